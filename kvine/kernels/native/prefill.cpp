// Attention of many queries (a tile of queries walks over tiles of keys, arXiv:2205.14135), shared out among threads by
// request, KV head and tile of queries. A query's sums are those of attention.cpp, step by step.
#include "sealed_rows.hpp"
#include "team.hpp"

namespace kvine {
namespace {

// Queries of a tile lie at multiples of its length. It divides 64 stretches of every length: all queries of a tile have
// stretches of the same one.
constexpr std::int64_t kMostQueries = 64, kLeastQueries = 8;
constexpr std::int64_t kMostFloats = 16 << 10;   // of a tile's queries: they and their sums stay in a core's cache
constexpr std::int64_t kTilesOfThread = 4;       // at least, so that threads end together
constexpr std::int64_t kLeastProducts = 1 << 18; // of a thread: waking one takes a few microseconds

constexpr Ahead kNothing{nullptr, 0};  // a tile of keys is read for so many queries that it has time to come

struct Item {
    const Prefill::Request* request;
    std::int64_t kv_head, begin, end;  // positions of its queries
};

std::int64_t first_of(const Prefill::Request& request) { return request.length - request.queries; }

std::int64_t start_of(const Prefill& task, std::int64_t position) {
    return task.window ? std::max<std::int64_t>(position - task.window + 1, 0) : 0;
}

// Pairs of query and key, sinks aside.
std::int64_t pairs_of(const Prefill& task, const Item& item) {
    return (item.end - item.begin) * (item.end - start_of(task, item.begin));
}

class TileOfQueries {
  public:
    TileOfQueries(const Path& path, const Prefill& task, const Item& item)
        : path_(path), prefill_(task), task_(task.each), item_(item),
          table_(task.each.tables + item.request->table), from_(item.begin), to_(item.end),
          rows_((item.end - item.begin) * task.each.group),
          stride_(stride_of(path, task.each.width)), scratch_(reserve()), all_(take_sums()), part_(take_sums()),
          x_(scratch_.take(rows_ * stride_)), x_sink_(task_.q_sink ? scratch_.take(rows_ * stride_) : x_),
          keys_(scratch_.take(stride_ * kTileKeys)), values_(scratch_.take(stride_ * kTileKeys)),
          scores_(scratch_.take(kBlockRows * kTileKeys)) {
        for (int place = 0; place < kTileKeys; ++place)
            rows_of_values_[place] = reinterpret_cast<const std::byte*>(values_ + place * stride_);
    }

    void attend() {
        const std::int64_t row = item_.request->row + item_.begin - first_of(*item_.request);
        const std::int64_t count = item_.end - item_.begin;
        load_queries(task_, task_.q, row, item_.kv_head, count, stride_, x_);
        if (task_.q_sink) load_queries(task_, task_.q_sink, row, item_.kv_head, count, stride_, x_sink_);
        all_.clear();
        const std::int64_t stretch = stretch_of(item_.end), start = start_of(prefill_, item_.begin);
        for (std::int64_t begin = 0; begin < item_.end; begin += stretch) {
            if (begin + stretch <= start && !keeps(begin, begin + stretch)) continue;
            part_.clear();
            for (std::int64_t tile = begin; tile < std::min(begin + stretch, item_.end); tile += kTileKeys)
                for_readers(tile, [&] {
                    for (int part = 0; part < num_parts(); ++part) read(part, tile);
                });
            all_.merge(part_);
        }
        write(path_, task_, all_, row, item_.kv_head);
    }

  private:
    struct Span {
        int begin, end;  // places in a tile of keys; nothing where begin is not before end
    };

    Scratch reserve() const {
        thread_local std::vector<float> kept;
        Scratch scratch(kept);
        scratch.reserve(2 * Sums::size(rows_, stride_) + 2 * Scratch::rounded(rows_ * stride_) +
                        (2 * stride_ + kBlockRows) * kTileKeys);
        return scratch;
    }

    Sums take_sums() { return {rows_, stride_, scratch_.take(Sums::size(rows_, stride_))}; }

    // Calls f for queries from_ to to_ that read a tile alike: all at once, but where it has packed blocks that are some
    // queries' own, those of each block by themselves.
    template <class F>
    void for_readers(std::int64_t tile, const F& f) {
        const std::int64_t size = task_.block_size;
        if (!task_.packed || tile + kTileKeys <= item_.begin / size * size) return f();
        for (from_ = item_.begin; from_ < item_.end; from_ = to_) {
            to_ = std::min((from_ / size + 1) * size, item_.end);
            f();
        }
        from_ = item_.begin, to_ = item_.end;
    }

    // Makes keys and values at places begin to end of a tile what queries from_ to to_ read.
    void load_tile(std::int64_t tile, int begin, int end) {
        if (task_.packed) {
            const std::int64_t first = first_of(*item_.request), length = item_.request->length;
            const OwnBlock own{from_ / task_.block_size, table_[(length + task_.block_size - 1) / task_.block_size],
                               first, item_.request->row};
            const SealedRows rows(path_, task_, table_, item_.kv_head);
            rows.read_keys(tile, begin, end, own, keys_);
            rows.read_values(tile, begin, end, own, stride_, values_);
            return;
        }
        const std::byte *keys[kTileKeys], *values[kTileKeys];
        locate(task_, table_, item_.kv_head, tile, begin, end, keys, values);
        path_.turn[task_.k_dtype](keys, begin, end, task_.width, keys_, kNothing);
        path_.widen[task_.v_dtype](values, begin, end, task_.width, values_);
    }

    // Sinks, each run of keys that is kept beside them, and the window, in the order that a single query sums them in.
    int num_parts() const { return static_cast<int>(item_.request->num_kept) + 2; }

    bool keeps(std::int64_t begin, std::int64_t end) const {
        if (begin < item_.request->sinks) return true;
        const Run* kept = task_.kept(*item_.request);
        return std::any_of(kept, kept + item_.request->num_kept,
                           [&](const Run& run) { return run.begin < end && begin < run.end; });
    }

    // Which keys of a part queries at `first` to `last` see in a tile, one with another.
    Span seen(int part, std::int64_t tile, std::int64_t first, std::int64_t last) const {
        const std::int64_t sinks = item_.request->sinks;
        std::int64_t begin = std::max(sinks, start_of(prefill_, first)), end = last + 1;
        if (part == 0) {
            begin = 0, end = std::min(sinks, end);
        } else if (part < num_parts() - 1) {
            const Run run = task_.kept(*item_.request)[part - 1];
            begin = std::max(sinks, run.begin), end = std::min(run.end, start_of(prefill_, last));
        }
        return {static_cast<int>(std::clamp<std::int64_t>(begin - tile, 0, kTileKeys)),
                static_cast<int>(std::clamp<std::int64_t>(end - tile, 0, kTileKeys))};
    }

    void read(int part, std::int64_t tile) {
        const auto [begin, end] = seen(part, tile, from_, to_ - 1);
        if (begin >= end) return;
        const bool alike = begin == seen(part, tile, to_ - 1, to_ - 1).begin &&
                           end == seen(part, tile, from_, from_).end;  // as in most tiles
        load_tile(tile, begin, end);
        const float* x = part ? x_ : x_sink_;
        const std::int64_t most = (to_ - item_.begin) * task_.group;
        for (std::int64_t row = (from_ - item_.begin) * task_.group; row < most; row += kBlockRows) {
            const int count = static_cast<int>(std::min<std::int64_t>(most - row, kBlockRows));
            Span spans[kBlockRows];
            for (int r = 0; r < count; ++r) {
                spans[r] = {begin, end};
                if (alike) continue;
                const std::int64_t position = item_.begin + (row + r) / task_.group;
                spans[r] = seen(part, tile, position, position);
            }
            const Span any{spans[0].begin, spans[count - 1].end};  // later queries see later keys
            if (any.begin >= any.end) continue;
            path_.score(x + row * stride_, count, task_.width, keys_, any.begin, any.end, scores_);
            weigh(row, count, spans);
            add(row, count, spans);
        }
    }

    void weigh(std::int64_t row, int count, const Span* spans) const {
        for (int r = 0; r < count; ++r) {
            if (spans[r].begin >= spans[r].end) continue;
            const float shrunk = path_.weigh(scores_ + r * kTileKeys, spans[r].begin, spans[r].end, task_.softcap,
                                             part_.greatest[row + r], part_.sum[row + r]);
            if (shrunk == 1.0f) continue;
            float* sums = part_.values + (row + r) * stride_;
            for (std::int64_t i = 0; i < stride_; ++i) sums[i] *= shrunk;
        }
    }

    // Keys that all rows see are added to all at once; those before and after them, to each row that sees them.
    void add(std::int64_t row, int count, const Span* spans) const {
        const int begin = spans[count - 1].begin, end = std::max(begin, spans[0].end);
        for (int r = 0; r < count; ++r) add_to(row + r, 1, r, {spans[r].begin, std::min(begin, spans[r].end)});
        add_to(row, count, 0, {begin, end});
        for (int r = 0; r < count; ++r) add_to(row + r, 1, r, {std::max(end, spans[r].begin), spans[r].end});
    }

    void add_to(std::int64_t row, int count, int first, Span span) const {
        if (span.begin < span.end)
            path_.add[kFp32](scores_ + first * kTileKeys, count, stride_, rows_of_values_, span.begin, span.end,
                             part_.values + row * stride_, kNothing);
    }

    const Path& path_;
    const Prefill& prefill_;
    const Decode& task_;
    const Item& item_;
    const std::int64_t* table_;
    std::int64_t from_, to_;  // positions of the queries that read at the moment
    std::int64_t rows_, stride_;
    Scratch scratch_;
    Sums all_, part_;
    float *x_, *x_sink_, *keys_, *values_, *scores_;
    const std::byte* rows_of_values_[kTileKeys];
};

// Tiles of queries that lie at multiples of `length`, for each KV head; those that take longest come first.
std::vector<Item> cut(const Prefill& task, std::int64_t length) {
    std::vector<Item> items;
    for (std::int64_t r = 0; r < task.num_requests; ++r) {
        const Prefill::Request& request = task.requests[r];
        for (std::int64_t begin = first_of(request); begin < request.length;) {
            const std::int64_t end = std::min(begin / length * length + length, request.length);
            for (std::int64_t kv_head = 0; kv_head < task.each.kv_heads; ++kv_head)
                items.push_back({&request, kv_head, begin, end});
            begin = end;
        }
    }
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) {
        return pairs_of(task, a) > pairs_of(task, b);
    });
    return items;
}

}  // namespace

std::int64_t products_of(const Prefill& task) {
    std::int64_t pairs = 0;
    for (std::int64_t r = 0; r < task.num_requests; ++r)
        pairs += pairs_of(task, {&task.requests[r], 0, first_of(task.requests[r]), task.requests[r].length});
    return pairs * task.each.kv_heads * task.each.group * task.each.width;
}

void prefill(const Path& path, const Prefill& task, int num_threads) {
    const int threads = static_cast<int>(
        std::clamp<std::int64_t>(products_of(task) / kLeastProducts, 1, std::max(num_threads, 1)));
    std::int64_t length = kMostQueries;
    while (length > kLeastQueries && length * task.each.group * stride_of(path, task.each.width) > kMostFloats)
        length /= 2;
    std::vector<Item> items = cut(task, length);
    while (threads > 1 && length > kLeastQueries && static_cast<std::int64_t>(items.size()) < threads * kTilesOfThread)
        items = cut(task, length /= 2);
    const auto count = static_cast<std::int64_t>(items.size());
    with_team(threads, num_threads, [&] {
#pragma omp for schedule(dynamic)
        for (std::int64_t i = 0; i < count; ++i) TileOfQueries(path, task, items[i]).attend();
    });
}

}  // namespace kvine
