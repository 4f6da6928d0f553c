// Attention of single queries, shared out among threads by request, KV head and stretch of the context.
#include <utility>

#include "sealed_rows.hpp"
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
        for_runs(task_, request_, [&](bool sinks, std::int64_t first, std::int64_t last) {
            read(sinks && task_.q_sink ? task_.q_sink : task_.q, std::max(begin, first), std::min(end, last), sums);
        });
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

// The same where full blocks are packed, which are read as they lie or are made fp32 in the nearest cache: the sums are the
// same.
class SealedStretch {
  public:
    SealedStretch(const Path& path, const Decode& task, const Decode::Request& request, std::int64_t kv_head)
        : path_(path), task_(task), request_(request), kv_head_(kv_head), stride_(stride_of(path, task.width)),
          rows_(path, task, task.tables + request.table, kv_head), own_(own_block()),
          scores_sealed_(path.scores_sealed(task.sealed_keys)), adds_sealed_(path.adds_sealed(task.sealed_values)) {
        thread_local std::vector<float> kept;
        Scratch scratch(kept);
        scratch.reserve(Scratch::rounded(task.group * stride_) + (task.group + 2 * stride_) * kTileKeys);
        x_ = scratch.take(task.group * stride_);
        scores_ = scratch.take(task.group * kTileKeys);
        keys_ = scratch.take(stride_ * kTileKeys);
        values_ = scratch.take(stride_ * kTileKeys);
        for (int place = 0; place < kTileKeys; ++place)
            rows_of_values_[place] = reinterpret_cast<const std::byte*>(values_ + place * stride_);
    }

    void attend(std::int64_t begin, std::int64_t end, const Sums& sums) {
        for_runs(task_, request_, [&](bool sinks, std::int64_t first, std::int64_t last) {
            read(sinks && task_.q_sink ? task_.q_sink : task_.q, std::max(begin, first), std::min(end, last), sums);
        });
    }

  private:
    void read(const std::byte* q, std::int64_t begin, std::int64_t end, const Sums& sums) {
        if (begin >= end) return;
        load_queries(task_, q, request_.row, kv_head_, 1, stride_, x_);
        rows_.for_blocks(begin, 0, static_cast<int>(std::min<std::int64_t>(end - begin, kTileKeys)),
                         [&](std::int64_t block, int, int, int) {
                             stream(task_.sealed_keys, rows_.keys_of(block), block).fetch(task_.sealed_keys.bytes / 64 + 1);
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
        rows_.for_blocks(tile, begin, end, [&](std::int64_t block, int token, int count, int place) {
            const std::int64_t later = block + kTileKeys / task_.block_size;  // about a tile ahead
            const bool read = later < own_.number && later * task_.block_size < most;
            const kvine::Stream next = read ? stream(task_.sealed_keys, rows_.keys_of(later), later) : kvine::Stream{};
            if (block != own_.number && adds_sealed_)
                return path_.add_sealed(task_.sealed_values, rows_.values_of(block), token, count, scores_ + place,
                                        task_.group, sums.values, next);
            rows_.read_values(tile, place, place + count, own_, stride_, values_);
            path_.add[kFp32](scores_, task_.group, stride_, rows_of_values_, place, place + count, sums.values,
                             {nullptr, 0});
        });
    }

    void score_tile(std::int64_t tile, int begin, int end) {
        const auto score = [&](int first, int last) {
            rows_.read_keys(tile, first, last, own_, keys_);
            path_.score(x_, task_.group, task_.width, keys_, first, last, scores_);
        };
        if (!scores_sealed_) return score(begin, end);
        rows_.for_blocks(tile, begin, end, [&](std::int64_t block, int token, int count, int place) {
            if (block == own_.number) return score(place, place + count);
            path_.score_sealed(task_.sealed_keys, rows_.keys_of(block), x_, task_.group, scores_ + place - token,
                               stream(task_.sealed_values, rows_.values_of(block), block));
        });
    }

    OwnBlock own_block() const {
        const std::int64_t number = (request_.length - 1) / task_.block_size;
        return {number, task_.tables[request_.table + number], request_.length, 0};
    }

    // All of a packed block's keys or values, to be asked of memory.
    kvine::Stream stream(const kvine::Sealed& part, const std::byte* begin, std::int64_t block) const {
        return block < own_.number ? kvine::Stream{begin, begin + part.bytes} : kvine::Stream{};
    }

    const Path& path_;
    const Decode& task_;
    const Decode::Request& request_;
    std::int64_t kv_head_, stride_;
    SealedRows rows_;
    OwnBlock own_;
    bool scores_sealed_, adds_sealed_;  // whether packed blocks are read as they lie
    float *x_, *scores_, *keys_, *values_;
    const std::byte* rows_of_values_[kTileKeys];
};

}  // namespace

std::int64_t context_bytes(const Decode& task) {
    std::int64_t keys = 0;
    for (std::int64_t r = 0; r < task.num_requests; ++r) {
        const Decode::Request& request = task.requests[r];
        for_runs(task, request, [&](bool, std::int64_t begin, std::int64_t end) { keys += std::max(begin, end) - begin; });
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
        const std::int64_t stretch = stretch_of(task.requests[r].length), kv_head = within % task.kv_heads;
        const std::int64_t number = within / task.kv_heads, begin = number * stretch;  // heads of a block lie side by side
        const Sums sums = partials[first[r] + kv_head * per_head + number];
        sums.clear();
        if (task.packed) {
            SealedStretch(path, task, task.requests[r], kv_head).attend(begin, begin + stretch, sums);
        } else {
            Stretch(path, task, task.requests[r], kv_head).attend(begin, begin + stretch, sums);
        }
        if (whole) write(path, task, sums, task.requests[r].row, kv_head);
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
