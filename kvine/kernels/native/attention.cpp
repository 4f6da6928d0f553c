// Attention of single queries, shared out among threads by request, KV head and stretch of the context.
#include <utility>

#include "paged.hpp"
#include "team.hpp"

namespace kvine {
namespace {

std::int64_t stretches_of(std::int64_t length) { return (length + stretch_of(length) - 1) / stretch_of(length); }

// What is known of each stretch.
class Partials {
  public:
    Partials(float* floats, std::int64_t group, std::int64_t stride)
        : group_(group), stride_(stride), size_(Sums::size(group, stride)), floats_(floats) {}

    Sums operator[](std::int64_t i) const { return {group_, stride_, floats_ + i * size_}; }

  private:
    std::int64_t group_, stride_, size_;
    float* floats_;
};

// One stretch of one request's context, for the query heads of one KV head.
class Stretch {
  public:
    Stretch(const Path& path, const Decode& task, const Decode::Request& request, std::int64_t kv_head)
        : path_(path), task_(task), request_(request), kv_head_(kv_head), stride_(stride_of(path, task.width)) {
        thread_local std::vector<float> kept;
        Scratch scratch(kept);
        scratch.reserve(Scratch::rounded(task.group * stride_) + (task.group + stride_) * kTileKeys);
        x_ = scratch.take(task.group * stride_);
        scores_ = scratch.take(task.group * kTileKeys);
        keys_ = scratch.take(stride_ * kTileKeys);
    }

    void attend(std::int64_t begin, std::int64_t end, const Sums& sums) {
        const std::int64_t sinks = std::min(task_.sinks, request_.length);
        read(task_.q_sink ? task_.q_sink : task_.q, begin, std::min(end, sinks), sums);
        read(task_.q, std::max({begin, sinks, request_.start}), std::min(end, request_.length), sums);
    }

  private:
    void read(const std::byte* q, std::int64_t begin, std::int64_t end, const Sums& sums) {
        if (begin >= end) return;
        load_queries(task_, q, request_.row, kv_head_, 1, stride_, x_);
        Tile tile = locate_tile(begin / kTileKeys * kTileKeys, begin, end);
        const Ahead first{tile.keys, task_.width * size_of(task_.k_dtype)};
        for (int place = tile.begin; place < tile.end; ++place) first.fetch(place);
        while (tile.begin < tile.end) {
            const Tile next = locate_tile(tile.first + kTileKeys, begin, end);
            read_tile(tile, next, sums);
            tile = next;
        }
    }

    // Places `begin` to `end` of the tile of keys that begins at `first`.
    struct Tile {
        std::int64_t first;
        int begin, end;
        const std::byte *keys[kTileKeys], *values[kTileKeys];
    };

    Tile locate_tile(std::int64_t first, std::int64_t begin, std::int64_t end) const {
        Tile tile{};
        tile.first = first;
        tile.begin = static_cast<int>(std::max<std::int64_t>(begin - first, 0));
        tile.end = static_cast<int>(std::min<std::int64_t>(end - first, kTileKeys));
        if (tile.begin < tile.end)
            locate(task_, task_.tables + request_.table, kv_head_, first, tile.begin, tile.end, tile.keys, tile.values);
        return tile;
    }

    void read_tile(const Tile& tile, const Tile& next, const Sums& sums) {
        const auto [begin, end] = std::pair(tile.begin, tile.end);
        const Ahead next_keys{next.keys, task_.width * size_of(task_.k_dtype)};
        const int panel = static_cast<int>(2 * path_.step);  // one after another in the same place, which stays near
        for (int at = begin / panel * panel; at < end; at += panel) {
            const int first = std::max(begin - at, 0), last = std::min(end - at, panel);
            const Ahead own_values{tile.values + at, task_.width * size_of(task_.v_dtype)};
            path_.turn[task_.k_dtype](tile.keys + at, first, last, task_.width, keys_, own_values);
            path_.score(x_, task_.group, task_.width, keys_, first, last, scores_ + at);
        }
        for (std::int64_t head = 0; head < task_.group; ++head) {
            const float shrunk = path_.weigh(scores_ + head * kTileKeys, begin, end, task_.softcap,
                                             sums.greatest[head], sums.sum[head]);
            if (shrunk != 1.0f)
                for (std::int64_t i = 0; i < stride_; ++i) sums.values[head * stride_ + i] *= shrunk;
        }
        path_.add[task_.v_dtype](scores_, task_.group, task_.width, tile.values, begin, end, sums.values, next_keys);
    }

    const Path& path_;
    const Decode& task_;
    const Decode::Request& request_;
    std::int64_t kv_head_, stride_;
    float *x_, *scores_, *keys_;
};

// The same where full blocks are packed. What a packed block holds is made fp32 in the nearest cache and read from there,
// so that sums are those over unpacked blocks.
class SealedStretch {
  public:
    SealedStretch(const Path& path, const Decode& task, const Decode::Request& request, std::int64_t kv_head)
        : path_(path), task_(task), request_(request), kv_head_(kv_head), stride_(stride_of(path, task.width)),
          own_((request.length - 1) / task.block_size), scores_sealed_(path.scores_sealed(task.sealed_keys)),
          adds_sealed_(path.adds_sealed(task.sealed_values)) {
        thread_local std::vector<float> kept;
        Scratch scratch(kept);
        scratch.reserve(Scratch::rounded(task.group * stride_) + (task.group + 3 * stride_) * kTileKeys);
        x_ = scratch.take(task.group * stride_);
        scores_ = scratch.take(task.group * kTileKeys);
        keys_ = scratch.take(stride_ * kTileKeys);
        values_ = scratch.take(stride_ * kTileKeys);
        turned_ = scratch.take(stride_ * kTileKeys);
        for (int place = 0; place < kTileKeys; ++place)
            rows_[place] = reinterpret_cast<const std::byte*>(values_ + place * stride_);
    }

    void attend(std::int64_t begin, std::int64_t end, const Sums& sums) {
        const std::int64_t sinks = std::min(task_.sinks, request_.length);
        read(task_.q_sink ? task_.q_sink : task_.q, begin, std::min(end, sinks), sums);
        read(task_.q, std::max({begin, sinks, request_.start}), std::min(end, request_.length), sums);
    }

  private:
    void read(const std::byte* q, std::int64_t begin, std::int64_t end, const Sums& sums) {
        if (begin >= end) return;
        load_queries(task_, q, request_.row, kv_head_, 1, stride_, x_);
        for_blocks(begin, std::min(end, begin + kTileKeys), [&](std::int64_t block, int, int, int) {
            stream(task_.sealed_k, task_.sealed_keys, block).fetch(task_.sealed_keys.bytes / 64 + 1);
        });
        for (std::int64_t tile = begin / kTileKeys * kTileKeys; tile < end; tile += kTileKeys) {
            const int first = static_cast<int>(std::max<std::int64_t>(begin - tile, 0));
            const int last = static_cast<int>(std::min<std::int64_t>(end - tile, kTileKeys));
            read_tile(tile, first, last, end, sums);
        }
    }

    // `most` is where the positions end that are read after this tile.
    void read_tile(std::int64_t tile, int begin, int end, std::int64_t most, const Sums& sums) {
        score_tile(tile, begin, end);
        for (std::int64_t head = 0; head < task_.group; ++head) {
            const float shrunk = path_.weigh(scores_ + head * kTileKeys, begin, end, task_.softcap,
                                             sums.greatest[head], sums.sum[head]);
            if (shrunk != 1.0f)
                for (std::int64_t i = 0; i < stride_; ++i) sums.values[head * stride_ + i] *= shrunk;
        }
        for_blocks(tile + begin, tile + end, [&](std::int64_t block, int token, int count, int place) {
            const std::int64_t later = block + kTileKeys / task_.block_size;  // about a tile ahead
            const bool read = later * task_.block_size < most;
            add_values(block, token, count, begin + place, sums,
                       read ? stream(task_.sealed_k, task_.sealed_keys, later) : kvine::Stream{});
        });
    }

    void score_tile(std::int64_t tile, int begin, int end) {
        if (scores_sealed_)
            return for_blocks(tile + begin, tile + end, [&](std::int64_t block, int token, int count, int place) {
                const kvine::Stream values = stream(task_.sealed_v, task_.sealed_values, block);
                const std::byte* keys = sealed(task_.sealed_k, task_.sealed_keys, block);
                float* scores = scores_ + begin + place - token;
                if (block != own_) return path_.score_sealed(task_.sealed_keys, keys, x_, task_.group, scores, values);
                turn_rows(block, token, count, token, keys_);
                path_.score(x_, task_.group, task_.width, keys_, token, token + count, scores);
            });
        const int panel = static_cast<int>(2 * path_.step);
        for (int at = begin / panel * panel; at < end; at += panel) {
            const int first = std::max(begin - at, 0), last = std::min(end - at, panel);
            for_blocks(tile + at + first, tile + at + last, [&](std::int64_t block, int token, int count, int place) {
                read_keys(block, token, count, first + place, stream(task_.sealed_v, task_.sealed_values, block));
            });
            path_.score(x_, task_.group, task_.width, keys_, first, last, scores_ + at);
        }
    }

    // Calls f(position of the block, its first token, tokens, place of the first) for positions begin to end.
    template <class F>
    void for_blocks(std::int64_t begin, std::int64_t end, const F& f) const {
        for (std::int64_t at = begin; at < end;) {
            const std::int64_t block = at / task_.block_size, next = std::min(end, (block + 1) * task_.block_size);
            f(block, static_cast<int>(at % task_.block_size), static_cast<int>(next - at), static_cast<int>(at - begin));
            at = next;
        }
    }

    std::int64_t entry(std::int64_t block) const { return task_.tables[request_.table + block]; }

    const std::byte* sealed(const std::byte* all, const kvine::Sealed& part, std::int64_t block) const {
        return all + (entry(block) * task_.kv_heads + kv_head_) * part.bytes;
    }

    // The rows of a block that are not packed: all of the own one, and of others what an element-wise codec keeps.
    const std::byte* row(const std::byte* open, const std::byte* all, const kvine::Sealed& part, DType dtype,
                         std::int64_t block, int token) const {
        const std::int64_t size = task_.width * size_of(dtype);
        if (block != own_) return sealed(all, part, block) + token * size;
        return open + ((entry(block) * task_.kv_heads + kv_head_) * task_.block_size + token) * size;
    }

    // Keys to places of a panel, beside those of other blocks.
    void read_keys(std::int64_t block, int token, int count, int place, kvine::Stream next) {
        if (block != own_ && task_.sealed_keys.bits)
            return path_.unseal_keys(task_.sealed_keys, sealed(task_.sealed_k, task_.sealed_keys, block), token, count,
                                     place, keys_, next);
        const int panel = static_cast<int>(2 * path_.step);
        turn_rows(block, token, count, place, turned_);
        for (std::int64_t d = 0; d < task_.width; ++d)
            std::copy_n(turned_ + d * panel + place, count, keys_ + d * panel + place);
    }

    // Keys that are not packed, of tokens in places of their own.
    void turn_rows(std::int64_t block, int token, int count, int place, float* keys) const {
        const std::byte* rows[kTileKeys];
        for (int i = 0; i < count; ++i)
            rows[place + i] = row(task_.k, task_.sealed_k, task_.sealed_keys, task_.k_dtype, block, token + i);
        path_.turn[task_.k_dtype](rows, place, place + count, task_.width, keys, {nullptr, 0});
    }

    void add_values(std::int64_t block, int token, int count, int place, const Sums& sums, kvine::Stream next) const {
        if (block != own_ && adds_sealed_)
            return path_.add_sealed(task_.sealed_values, sealed(task_.sealed_v, task_.sealed_values, block), token, count,
                                    scores_ + place, task_.group, sums.values, next);
        read_values(block, token, count, values_ + place * stride_, next);
        path_.add[kFp32](scores_, task_.group, stride_, rows_, place, place + count, sums.values, {nullptr, 0});
    }

    void read_values(std::int64_t block, int token, int count, float* to, kvine::Stream next) const {
        if (block != own_ && task_.sealed_values.bits)
            return path_.unseal_values(task_.sealed_values, sealed(task_.sealed_v, task_.sealed_values, block), token,
                                       count, stride_, to, next);
        for (int i = 0; i < count; ++i) {
            const std::byte* from = row(task_.v, task_.sealed_v, task_.sealed_values, task_.v_dtype, block, token + i);
            path_.to_floats[task_.v_dtype](from, to + i * stride_, 0, task_.width);
        }
    }

    // All of a packed block's keys or values, to be asked of memory.
    kvine::Stream stream(const std::byte* all, const kvine::Sealed& part, std::int64_t block) const {
        if (block >= own_) return {};
        const std::byte* begin = sealed(all, part, block);
        return {begin, begin + part.bytes};
    }

    const Path& path_;
    const Decode& task_;
    const Decode::Request& request_;
    std::int64_t kv_head_, stride_, own_;
    bool scores_sealed_, adds_sealed_;  // packed blocks as they lie
    float *x_, *scores_, *keys_, *values_, *turned_;
    const std::byte* rows_[kTileKeys];
};

}  // namespace

std::int64_t context_bytes(const Decode& task) {
    std::int64_t keys = 0;
    for (std::int64_t r = 0; r < task.num_requests; ++r) {
        const Decode::Request& request = task.requests[r];
        keys += request.length - std::max<std::int64_t>(request.start - task.sinks, 0);
    }
    return keys * task.kv_heads * task.width * (size_of(task.k_dtype) + size_of(task.v_dtype));
}

std::int64_t partial_floats(const Path& path, const Decode& task) {
    std::int64_t count = 0;
    for (std::int64_t r = 0; r < task.num_requests; ++r)
        count += stretches_of(task.requests[r].length) * task.kv_heads;
    return count * Sums::size(task.group, stride_of(path, task.width));
}

void decode_in_team(const Path& path, const Decode& task, float* floats) {
    thread_local std::vector<std::int64_t> first;  // stretch of each request, for its first KV head
    first.assign(1, 0);
    for (std::int64_t r = 0; r < task.num_requests; ++r)
        first.push_back(first.back() + stretches_of(task.requests[r].length) * task.kv_heads);
    const Partials partials(floats, task.group, stride_of(path, task.width));
    const bool whole = first.back() == task.num_requests * task.kv_heads;  // each stretch is all of a context
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < first.back(); ++i) {
        const std::int64_t r = std::upper_bound(first.begin(), first.end(), i) - first.begin() - 1;
        const std::int64_t per_head = (first[r + 1] - first[r]) / task.kv_heads, within = i - first[r];
        const std::int64_t stretch = stretch_of(task.requests[r].length), begin = within % per_head * stretch;
        partials[i].clear();
        if (task.packed) {
            SealedStretch(path, task, task.requests[r], within / per_head).attend(begin, begin + stretch, partials[i]);
        } else {
            Stretch(path, task, task.requests[r], within / per_head).attend(begin, begin + stretch, partials[i]);
        }
        if (whole) write(path, task, partials[i], task.requests[r].row, within);
    }
    if (whole) return;
#pragma omp for
    for (std::int64_t i = 0; i < task.num_requests * task.kv_heads; ++i) {
        const std::int64_t r = i / task.kv_heads, kv_head = i % task.kv_heads;
        const std::int64_t per_head = (first[r + 1] - first[r]) / task.kv_heads, n = first[r] + kv_head * per_head;
        for (std::int64_t next = n + 1; next < n + per_head; ++next) partials[n].merge(partials[next]);
        write(path, task, partials[n], task.requests[r].row, kv_head);
    }
}

void decode(const Path& path, const Decode& task, int num_threads) {
    thread_local std::vector<float> kept;
    Scratch scratch(kept);
    const std::int64_t needed = partial_floats(path, task);
    scratch.reserve(needed);
    float* floats = scratch.take(needed);
    with_team(context_bytes(task) / kLeastBytesOfThread, num_threads, [&] { decode_in_team(path, task, floats); });
}

}  // namespace kvine
