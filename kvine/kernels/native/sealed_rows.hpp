// What one query reads where full blocks are packed, or several of one block: that block exactly, and those before it as
// the codec has kept them, made fp32.
#pragma once

#include "paged.hpp"

namespace {

// The block that queries are in themselves. Its tokens up to position `fresh` are in an open block, and those from there
// on are rows of what the step has computed: the first of them row `row`.
struct OwnBlock {
    std::int64_t number, open, fresh, row;
};

class SealedRows {
  public:
    SealedRows(const Path& path, const Decode& task, const std::int64_t* table, std::int64_t kv_head)
        : path_(path), task_(task), table_(table), kv_head_(kv_head) {}

    // Calls f(number of the block, its first token, tokens, place of the first) for places begin to end of a tile.
    template <class F>
    void for_blocks(std::int64_t tile, int begin, int end, const F& f) const {
        for (std::int64_t at = tile + begin; at < tile + end;) {
            const std::int64_t block = at / task_.block_size, next = std::min(tile + end, (block + 1) * task_.block_size);
            f(block, static_cast<int>(at % task_.block_size), static_cast<int>(next - at), static_cast<int>(at - tile));
            at = next;
        }
    }

    const std::byte* keys_of(std::int64_t block) const { return sealed(task_.sealed_k, task_.sealed_keys, block); }
    const std::byte* values_of(std::int64_t block) const { return sealed(task_.sealed_v, task_.sealed_values, block); }

    // Keys at places begin to end of a tile, side by side in panels. Those of the own block come first: what is turned
    // beside them is then written over.
    void read_keys(std::int64_t tile, int begin, int end, const OwnBlock& own, float* keys) const {
        const kvine::Sealed& part = task_.sealed_keys;
        const std::byte* rows[kTileKeys];
        const int first = locate(tile, begin, end, own, part, task_.k, task_.new_k, task_.sealed_k, task_.k_dtype, rows);
        if (first < end) path_.turn[task_.k_dtype](rows, first, end, task_.width, keys, {nullptr, 0});
        const int panel = static_cast<int>(2 * path_.step);
        for (int at = begin; at < first;) {  // runs within a panel
            const int next = std::min(first, (at / panel + 1) * panel);
            for_blocks(tile, at, next, [&](std::int64_t block, int token, int count, int place) {
                path_.unseal_keys(part, keys_of(block), token, count, place, keys, {});
            });
            at = next;
        }
    }

    // Values likewise, as rows `stride` apart.
    void read_values(std::int64_t tile, int begin, int end, const OwnBlock& own, std::int64_t stride, float* values) const {
        const kvine::Sealed& part = task_.sealed_values;
        const std::byte* rows[kTileKeys];
        const int first = locate(tile, begin, end, own, part, task_.v, task_.new_v, task_.sealed_v, task_.v_dtype, rows);
        for_blocks(tile, begin, first, [&](std::int64_t block, int token, int count, int place) {
            path_.unseal_values(part, values_of(block), token, count, stride, values + place * stride, {});
        });
        for (int place = first; place < end; ++place)
            path_.to_floats[task_.v_dtype](rows[place], values + place * stride, 0, task_.width);
    }

  private:
    const std::byte* sealed(const std::byte* all, const kvine::Sealed& part, std::int64_t block) const {
        return all + (table_[block] * task_.kv_heads + kv_head_) * part.bytes;
    }

    // Where the rows lie that are not packed: from which place on, those of the own block and, of a part that an
    // element-wise codec keeps, those of all blocks.
    int locate(std::int64_t tile, int begin, int end, const OwnBlock& own, const kvine::Sealed& part,
               const std::byte* open, const std::byte* fresh, const std::byte* all, DType dtype,
               const std::byte** rows) const {
        const std::int64_t size = task_.width * size_of(dtype), own_begin = own.number * task_.block_size;
        const int first = part.bits ? static_cast<int>(std::clamp<std::int64_t>(own_begin - tile, begin, end)) : begin;
        for_blocks(tile, first, end, [&](std::int64_t block, int token, int count, int place) {
            for (int i = 0; i < count; ++i) {
                const std::int64_t position = tile + place + i;
                if (block != own.number) {
                    rows[place + i] = sealed(all, part, block) + (token + i) * size;
                } else if (position < own.fresh) {
                    rows[place + i] = open + ((own.open * task_.kv_heads + kv_head_) * task_.block_size + token + i) * size;
                } else {
                    rows[place + i] = fresh + ((own.row + position - own.fresh) * task_.kv_heads + kv_head_) * size;
                }
            }
        });
        return first;
    }

    const Path& path_;
    const Decode& task_;
    const std::int64_t* table_;
    std::int64_t kv_head_;
};

}  // namespace
