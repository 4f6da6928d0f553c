// A step through all layers by one team of threads, which meets between its stages: starting a team for each product, and
// going back to Python between them, takes as long as the arithmetic of a small model.
#include "stack.hpp"

#include <algorithm>
#include <initializer_list>

#include "team.hpp"

namespace kvine {
namespace {

constexpr std::int64_t kAlignment = 64;

// One piece of memory cut up among the stages: asked for twice, first to learn how much it is.
class Room {
  public:
    explicit Room(std::byte* start) : start_(start) {}

    template <class T>
    T* take(std::int64_t count) {
        T* taken = start_ ? reinterpret_cast<T*>(start_ + size_) : nullptr;
        size_ += (count * static_cast<std::int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
        return taken;
    }

    std::int64_t size() const { return size_; }

  private:
    std::byte* start_;
    std::int64_t size_ = 0;
};

std::int64_t up_to_whole(std::int64_t count, std::int64_t step) { return (count + step - 1) / step * step; }

// What one kind needs in a step: cosines and sines [rows, rotary], and where its K and V go, [rows * kv_heads].
struct Place {
    float *cos, *sin, *sink_cos, *sink_sin;
    std::int64_t *cache_rows, *positions, *sink_positions;
    bool sinks_moved;
    Decode attention;
};

class Step {
  public:
    Step(const Stack& stack, const StackStep& step, int num_threads, Room room)
        : stack_(stack), path_(*stack.path), step_(step), rows_(step.rows), single_(step.rows == 1) {
        std::int64_t widest_in = stack.hidden, intermediate = 0, partials = 0;
        for (const Layer& layer : stack.layers) {
            widest_in = std::max({widest_in, layer.o.in, layer.down.in});
            intermediate = std::max(intermediate, layer.gate.out);
        }
        for (const Kind& kind : stack.kinds) {
            places_.push_back(place_of(kind, room));
            partials = std::max(partials, partial_floats(path_, places_.back().attention));
        }
        const std::int64_t bytes = rows_ * size_of(stack.dtype), kv_width = stack.kv_heads * stack.width;
        for (std::byte** buffer : {&q_, &turned_q_, &sink_q_, &attended_})
            *buffer = room.take<std::byte>(bytes * stack.heads * stack.width);
        for (std::byte** buffer : {&k_, &turned_k_, &v_}) *buffer = room.take<std::byte>(bytes * kv_width);
        y_ = room.take<std::byte>(bytes * stack.hidden);
        for (std::byte** buffer : {&gate_, &up_}) *buffer = room.take<std::byte>(bytes * intermediate);
        logits_ = room.take<std::byte>(step.num_wanted * size_of(stack.dtype) * stack.head.out);
        rows_of_.resize(single_ ? std::max(num_threads, 1) : 1);
        for (Rows& rows : rows_of_) {
            const std::int64_t groups = rows_ * widest_in / kGroup;
            rows.hidden = room.take<std::byte>(bytes * stack.hidden);
            rows.x = room.take<std::byte>(bytes * stack.hidden);
            rows.arranged = room.take<float>(rows_ * up_to_whole(widest_in, path_.step));
            rows.quantized = {room.take<std::int8_t>(groups * kGroup), room.take<float>(groups),
                              room.take<float>(groups), room.take<std::int32_t>(2 * groups)};
        }
        partials_ = room.take<float>(partials);
        size_ = room.size();
    }

    std::int64_t size() const { return size_; }

    // What follows is called by each member of a team.
    void run() const {
        embed();
        for (std::size_t kind = 0; kind < places_.size(); ++kind) find_place(stack_.kinds[kind], places_[kind]);
        for (const Layer& layer : stack_.layers) {
            attend(layer);
            feed_forward(layer);
        }
        compute_logits();
    }

  private:
    // What goes from layer to layer, and what products read of it.
    struct Rows {
        std::byte *hidden, *x;
        float* arranged;
        Quantized quantized;
    };

    // Members share the rows out, and each waits for the others' before it multiplies with all. A single row is every
    // member's own, which takes no longer than to wait for the one that has it.
    const Rows& own() const { return rows_of_[single_ ? omp_get_thread_num() : 0]; }
    Part own_rows() const { return single_ ? Part{0, 1} : part_of(rows_); }
    void meet_with_rows() const {
        if (!single_) meet();
    }

    Place place_of(const Kind& kind, Room& room) const {
        Place place{};
        for (float** angles : {&place.cos, &place.sin, &place.sink_cos, &place.sink_sin})
            *angles = room.take<float>(rows_ * 2 * kind.angles.count);
        place.cache_rows = room.take<std::int64_t>(rows_ * stack_.kv_heads);
        place.positions = room.take<std::int64_t>(rows_);
        place.sink_positions = room.take<std::int64_t>(rows_);
        place.attention = attention_of(stack_, kind, step_);
        for (std::int64_t r = 0; r < rows_; ++r)
            place.sinks_moved |= place.attention.requests[r].length > place.attention.requests[r].moves_from;
        return place;
    }

    void find_place(const Kind& kind, const Place& place) const {
        const Part rows = part_of(rows_);
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            const Decode::Request& request = place.attention.requests[row];
            const std::int64_t position = request.length - 1;
            const std::int64_t block = place.attention.tables[request.table + position / kind.block_size];
            for (std::int64_t head = 0; head < stack_.kv_heads; ++head)
                place.cache_rows[row * stack_.kv_heads + head] =
                    (block * stack_.kv_heads + head) * kind.block_size + position % kind.block_size;
            place.positions[row] = position;
            place.sink_positions[row] = std::min(position, request.moves_from - 1);
        }
        cos_sin(kind.angles, place.positions, place.cos, place.sin, rows.begin, rows.end);
        if (place.sinks_moved)
            cos_sin(kind.angles, place.sink_positions, place.sink_cos, place.sink_sin, rows.begin, rows.end);
    }

    void embed() const {
        const Part rows = own_rows();
        std::byte* hidden = own().hidden;
        const std::int64_t size = stack_.hidden * size_of(stack_.dtype);
        const Weight& table = stack_.embedding;
        if (table.packing != kExact)
            unpack_rows(Packing(table.packing), table.weight, stack_.hidden, step_.ids + rows.begin,
                        rows.end - rows.begin, stack_.dtype, hidden + rows.begin * size, 1);
        else
            for (std::int64_t row = rows.begin; row < rows.end; ++row)
                std::copy_n(table.weight + step_.ids[row] * size, size, hidden + row * size);
        if (stack_.embedding_scale != 1.0f)
            path_.multiply_by[stack_.dtype](hidden, stack_.embedding_scale, rows.begin * stack_.hidden,
                                            rows.end * stack_.hidden);
    }

    void compute_logits() const {
        if (!step_.num_wanted) return;
        const std::int64_t size = stack_.hidden * size_of(stack_.dtype), count = step_.num_wanted;
        const Rows& own = this->own();
        meet_with_rows();  // a member's rows may be wanted by another
        const Part wanted = single_ ? Part{0, 1} : part_of(count);
        if (!single_)
            for (std::int64_t i = wanted.begin; i < wanted.end; ++i)
                std::copy_n(own.hidden + step_.wanted[i] * size, size, y_ + i * size);
        normalize(single_ ? own.hidden : y_, stack_.final_norm, own.x, wanted, 1, stack_.hidden);
        prepare(own.x, {&stack_.head}, count, wanted);
        meet_with_rows();
        const Part columns = multiply_part(stack_.head, logits_, count, part_of(units(stack_.head)));
        for (std::int64_t i = 0; i < count; ++i)
            path_.to_floats[stack_.dtype](logits_, step_.logits, i * stack_.head.out + columns.begin,
                                      i * stack_.head.out + columns.end);
    }

    void attend(const Layer& layer) const {
        const Kind& kind = stack_.kinds[layer.kind];
        const Place& place = places_[layer.kind];
        const Part rows = part_of(rows_), own_rows = this->own_rows();
        normalize(own().hidden, layer.attn_norm, own().x, own_rows, 1, stack_.hidden);
        prepare(own().x, {&layer.q, &layer.k, &layer.v}, rows_, own_rows);
        meet_with_rows();
        multiply({{&layer.q, q_}, {&layer.k, k_}, {&layer.v, v_}});
        meet();
        const std::byte* q = q_;
        if (layer.q_norm) {
            normalize(q_, layer.q_norm, attended_, rows, stack_.heads, stack_.width);
            q = attended_;
        }
        const std::int64_t rotary = 2 * kind.angles.count;
        rotate(q, place.cos, place.sin, rotary, turned_q_, rows, stack_.heads);
        if (place.sinks_moved) rotate(q, place.sink_cos, place.sink_sin, rotary, sink_q_, rows, stack_.heads);
        write_cache(layer, place, rotary, rows);
        meet();
        Decode task = place.attention;
        task.q = turned_q_, task.q_sink = place.sinks_moved ? sink_q_ : nullptr, task.y = attended_;
        task.k = layer.keys, task.v = layer.values;
        task.sealed_k = layer.sealed_keys, task.sealed_v = layer.sealed_values;
        decode_in_team(path_, task, partials_);
        prepare(attended_, {&layer.o}, rows_, own_rows);
        meet_with_rows();
        multiply({{&layer.o, y_}});
        meet();
        add(layer.post_attn_norm, own_rows);
    }

    void feed_forward(const Layer& layer) const {
        const Part rows = own_rows();
        normalize(own().hidden, layer.mlp_norm, own().x, rows, 1, stack_.hidden);
        prepare(own().x, {&layer.gate, &layer.up}, rows_, rows);
        meet_with_rows();
        const Part columns = multiply_part(layer.gate, gate_, rows_, part_of(units(layer.gate)));
        multiply_part(layer.up, up_, rows_, part_of(units(layer.up)));
        const Gated gated{gate_, up_, gate_, stack_.activation};
        for (std::int64_t row = 0; row < rows_; ++row)
            path_.gate[stack_.dtype](gated, row * layer.gate.out + columns.begin, row * layer.gate.out + columns.end);
        meet();
        prepare(gate_, {&layer.down}, rows_, rows);
        meet_with_rows();
        multiply({{&layer.down, y_}});
        meet();
        add(layer.post_mlp_norm, rows);
    }

    // Rows of x with `heads` heads each, normed one by one.
    void normalize(const std::byte* x, const float* weight, std::byte* y, Part rows, std::int64_t heads,
                   std::int64_t width) const {
        const Norm norm{x, weight, y, rows_ * heads, width, stack_.eps};
        path_.normalize[stack_.dtype](norm, rows.begin * heads, rows.end * heads);
    }

    void rotate(const std::byte* x, const float* cos, const float* sin, std::int64_t rotary, std::byte* y, Part rows,
                std::int64_t heads) const {
        const Rotation rotation{x, cos, sin, y, rows_, heads, stack_.width, rotary};
        path_.rotate[stack_.dtype](rotation, rows.begin, rows.end);
    }

    void write_cache(const Layer& layer, const Place& place, std::int64_t rotary, Part rows) const {
        std::byte *k = k_, *turned = turned_k_;
        if (layer.k_norm) {
            normalize(k_, layer.k_norm, turned_k_, rows, stack_.kv_heads, stack_.width);
            std::swap(k, turned);
        }
        rotate(k, place.cos, place.sin, rotary, turned, rows, stack_.kv_heads);
        const std::int64_t first = rows.begin * stack_.kv_heads;
        const std::int64_t offset = first * stack_.width * size_of(stack_.dtype);
        write({turned + offset, v_ + offset, place.cache_rows + first, layer.keys, layer.values,
               (rows.end - rows.begin) * stack_.kv_heads, stack_.width, stack_.dtype, place.attention.k_dtype,
               place.attention.v_dtype});
    }

    // hidden += y, normed first where there is a norm.
    void add(const float* norm, Part rows) const {
        if (norm) normalize(y_, norm, own().x, rows, 1, stack_.hidden);
        path_.add_to[stack_.dtype]({own().hidden, norm ? own().x : y_}, rows.begin * stack_.hidden,
                                   rows.end * stack_.hidden);
    }

    // Makes of `rows` of x, which has `count`, what the products with these weights read.
    void prepare(const std::byte* x, std::initializer_list<const Weight*> weights, std::int64_t count, Part rows) const {
        const auto packed = [](const Weight* weight) { return weight->packing != kExact; };
        const std::int64_t in = (*weights.begin())->in;
        if (std::any_of(weights.begin(), weights.end(), packed))
            path_.quantize[stack_.dtype]({x, nullptr, nullptr, nullptr, count, in, 0}, own().quantized, rows.begin,
                                         rows.end);
        if (std::all_of(weights.begin(), weights.end(), packed)) return;
        const std::byte* first = x + rows.begin * in * size_of(stack_.dtype);
        path_.arrange[stack_.dtype]({first, nullptr, nullptr, nullptr, rows.end - rows.begin, in, 0},
                                    own().arranged + rows.begin * up_to_whole(in, path_.step));
    }

    // Outputs are shared out by tiles, so that those of packed weights stay whole.
    static std::int64_t units(const Weight& weight) { return tiles_of(weight.out); }

    // Units of a product of the `count` rows that were prepared; returns its columns of y.
    Part multiply_part(const Weight& weight, std::byte* y, std::int64_t count, Part part) const {
        const Product product{nullptr, weight.weight, weight.bias, y, count, weight.in, weight.out};
        const auto column = [&](std::int64_t unit) { return std::min(unit * kTileOfOutputs, weight.out); };
        const Part columns{column(part.begin), column(part.end)};
        if (part.begin == part.end) return columns;
        if (weight.packing == kExact)
            path_.multiply[stack_.dtype](product, own().arranged, columns.begin, columns.end);
        else
            path_.multiply_packed[weight.packing](product, stack_.dtype, own().quantized, part.begin, part.end);
        return columns;
    }

    struct Result {
        const Weight* weight;
        std::byte* y;
    };

    // The units of all of these products together are shared out evenly.
    void multiply(std::initializer_list<Result> results) const {
        std::int64_t total = 0;
        for (const Result& result : results) total += units(*result.weight);
        Part part = part_of(total);
        for (const Result& result : results) {
            const std::int64_t count = units(*result.weight);
            const Part own{std::clamp<std::int64_t>(part.begin, 0, count), std::clamp<std::int64_t>(part.end, 0, count)};
            multiply_part(*result.weight, result.y, rows_, own);
            part.begin -= count, part.end -= count;
        }
    }

    const Stack& stack_;
    const Path& path_;
    const StackStep& step_;
    std::vector<Place> places_;
    std::int64_t rows_, size_;
    bool single_;
    std::vector<Rows> rows_of_;  // of all members, or of each
    std::byte *q_, *turned_q_, *sink_q_, *attended_, *k_, *turned_k_, *v_, *y_, *gate_, *up_, *logits_;
    float* partials_;
};

}  // namespace

Decode attention_of(const Stack& stack, const Kind& kind, const StackStep& step) {
    Decode task{};
    task.requests = step.requests[kind.group];
    task.tables = reinterpret_cast<const std::int64_t*>(task.requests + step.rows);
    task.num_requests = step.rows;
    task.kv_heads = stack.kv_heads, task.group = stack.heads / stack.kv_heads, task.width = stack.width;
    task.block_size = kind.block_size;
    task.scale = stack.scale, task.softcap = stack.softcap;
    task.dtype = stack.dtype, task.k_dtype = kind.k_dtype, task.v_dtype = kind.v_dtype;
    task.packed = kind.packed, task.sealed_keys = kind.sealed_keys, task.sealed_values = kind.sealed_values;
    return task;
}

void run(const Stack& stack, const StackStep& step, int num_threads) {
    thread_local std::vector<std::byte> kept;
    const auto needed = static_cast<std::size_t>(Step(stack, step, num_threads, Room(nullptr)).size() + kAlignment);
    if (kept.size() < needed) kept.resize(needed);
    const auto misplaced = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(kept.data()) % kAlignment);
    const Step planned(stack, step, num_threads, Room(kept.data() + (kAlignment - misplaced)));
    with_team(num_threads, num_threads, [&] { planned.run(); });
}

}  // namespace kvine
