// What the kernels compute, and the instruction sets that they are compiled for.
//
// All tensors are row-major and contiguous, at any address, in one dtype but where fp32 is said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvine {

enum DType : int { kFp32, kBf16, kFp16, kNumDTypes };

constexpr std::int64_t size_of(DType dtype) { return dtype == kFp32 ? 4 : 2; }

// y = x Wᵀ + b, of few rows.
struct Product {
    const std::byte* x;       // [rows, in]
    const std::byte* weight;  // [out, in]
    const std::byte* bias;    // [out], or null
    std::byte* y;             // [rows, out]
    std::int64_t rows, in, out;
};

// y = x / sqrt(mean(x²) + eps) * weight, of each row.
struct Norm {
    const std::byte* x;   // [rows, width]
    const float* weight;  // [width]
    std::byte* y;         // [rows, width]
    std::int64_t rows, width;
    float eps;
};

// y = x * cos + (x with the halves of its first `rotary` dimensions exchanged) * sin; the other dimensions are copied.
struct Rotation {
    const std::byte* x;      // [rows, heads, width]
    const float *cos, *sin;  // [rows, rotary]
    std::byte* y;            // [rows, heads, width]
    std::int64_t rows, heads, width, rotary;
};

// y = f(gate) * up, number by number, f(gate) rounded first.
struct Gated {
    enum Activation : int { kSilu, kGeluTanh, kNumActivations };
    const std::byte *gate, *up;
    std::byte* y;  // may be gate
    Activation activation;
};

// x += y, number by number.
struct Sum {
    std::byte* x;
    const std::byte* y;
};

// What positions turn by: `count` frequencies, as many as there are pairs of dimensions.
struct Angles {
    const double* frequencies;  // radians a position
    std::int64_t count;
    double scaling;  // of cosines and sines
};

// Rows of K and V on their way into the cache: row i of each goes to row rows[i].
struct Write {
    const std::byte *k, *v;    // [count, width]
    const std::int64_t* rows;  // [count]
    std::byte *k_to, *v_to;    // [any, width], in dtypes of their own
    std::int64_t count, width;
    DType dtype, k_dtype, v_dtype;
};

// How one head's keys or values of a full block are packed, see kvine/cache/layout.py. Without bits they are rows as in an
// open block.
struct Sealed {
    int bits;
    bool by_channel;                       // scales belong to channels over all tokens, else to tokens over groups of channels
    std::int64_t group;                    // channels that share a scale
    std::int64_t block_size, width, bytes;

    std::int64_t code_bytes() const { return block_size * width * bits / 8; }
    std::int64_t num_groups() const { return by_channel ? width : block_size * (width / group); }
};

// Bytes that are asked of memory a few lines at a time, while others are computed with: all at once would fill the queue.
struct Stream {
    const std::byte *at, *end;

    void fetch(std::int64_t lines) {
        for (; lines > 0 && at < end; --lines, at += 64) __builtin_prefetch(at);
    }
    std::int64_t lines() const { return (end - at + 63) / 64; }
};

// Keys begin to end - 1.
struct Run {
    std::int64_t begin, end;
};

// Attention of requests with one query each: softmax(q Kᵀ * scale) V over what it may see of its own blocks.
struct Decode {
    struct Request {
        std::int64_t row;         // of q and y
        std::int64_t length;      // keys up to its own
        std::int64_t start;       // the first key that its window reaches
        std::int64_t table;       // where its block table begins
        std::int64_t sinks;       // so many first keys are seen whatever the window
        std::int64_t moves_from;  // a query from here on reads the sinks as if it stood right before
        std::int64_t num_kept;    // runs of other keys that are seen whatever the window, ascending
        std::int64_t kept;        // where among the tables they lie
    };

    const std::byte *q, *q_sink;  // [rows, kv_heads * group, width]; q_sink reads the sinks, or is null and q does
    const std::byte *k, *v;       // [blocks, kv_heads, block_size, width], in dtypes of their own
    std::byte* y;                 // like q
    const Request* requests;
    const std::int64_t* tables;  // of blocks, each by position; and runs of keys
    std::int64_t num_requests, kv_heads, group, width, block_size;
    float scale, softcap;  // a score s becomes c * tanh(s / c); a cap of 0 is none
    DType dtype, k_dtype, v_dtype;

    // Where full blocks are packed, k and v hold the open ones: a block table's last entry names one of these, and all
    // before it packed ones, [blocks, kv_heads, bytes].
    bool packed = false;
    Sealed sealed_keys{}, sealed_values{};
    const std::byte *sealed_k = nullptr, *sealed_v = nullptr;
    const std::byte *new_k = nullptr, *new_v = nullptr;  // of `Prefill`, which see: [rows, kv_heads, width]

    template <class AnyRequest>
    const Run* kept(const AnyRequest& request) const {
        return reinterpret_cast<const Run*>(tables + request.kept);
    }
};

// Attention of requests with any number of queries, each computed as `Decode` computes it alone: the same bits. Where full
// blocks are packed, a query's own block is read exactly and those before it as packed, all of which a table names. Tokens
// of the step itself are read from the rows of new_k and new_v, at the queries' own; of those before them that share a
// block with the first query, the entry behind the table's last names the open block.
struct Prefill {
    struct Request {
        std::int64_t row;      // of q and y: its first
        std::int64_t queries;  // how many rows; the last sees all of its keys
        std::int64_t length;   // keys up to the last query's own
        std::int64_t table;    // where its block table begins
        std::int64_t sinks, num_kept, kept;  // see Decode
    };

    Decode each;  // whose own requests are not used
    const Request* requests;
    std::int64_t num_requests;
    std::int64_t window;  // how many keys a query sees, its own included; 0 for all
};

// How weights are packed: whole numbers q of a few bits, in groups of 32 along a row, and what scales them. Of those
// called `Super`, 8 groups are a superblock, whose fp16 numbers are multiplied with a small whole number of each group.
enum Packing : int {
    k8Bit,       // scale * q, q from -128 to 127, the scale in fp16
    k4Bit,       // scale * (q - 8), q from 0 to 15
    k4BitLeast,  // scale * q + least, q from 0 to 15; scale and the least value of a group in fp16
    k5Bit,       // scale * (q - 16), q from 0 to 31
    k5BitLeast,  // scale * q + least, q from 0 to 31
    k4BitSuper,  // like k4BitLeast, but scale and least are whole numbers times the superblock's
    k5BitSuper,  // like k5BitLeast, likewise
    k6BitSuper,  // scale * (q - 32), q from 0 to 63; each half of a group has a scale, whole numbers likewise
    kNumPackings
};

enum class Scaling { kScale, kLeast, kSuperLeast, kSuperHalves };

// These are static for the reason that is in formats.hpp.
static constexpr int bits_of(Packing packing) {
    constexpr int bits[kNumPackings] = {8, 4, 4, 5, 5, 4, 5, 6};
    return bits[packing];
}

static constexpr Scaling scaling_of(Packing packing) {
    constexpr Scaling scalings[kNumPackings] = {
        Scaling::kScale,      Scaling::kScale,      Scaling::kLeast, Scaling::kScale, Scaling::kLeast,
        Scaling::kSuperLeast, Scaling::kSuperLeast, Scaling::kSuperHalves};
    return scalings[packing];
}

// Whether a product has no part for the least value: its q is a number with a sign, stored so or 32 too large.
static constexpr bool is_signed(Packing packing) { return bits_of(packing) == 8 || bits_of(packing) == 6; }

// A packed weight is a row of tiles of 16 outputs; a tile is a row of groups, and a group of 16 outputs is
//
//   8 bits: 8 chunks of 64 bytes: for each output the 4 inputs that come next
//   fewer:  4 chunks of 64 bytes: for each output 4 bytes, of which the lower halves are the 4 inputs that come next,
//           and the upper halves the 4 after these; of each input its lower 4 bits
//   5 bits: then 64 bytes, 4 for each output: bit c of byte j is the fifth bit of input 4 * c + j
//   6 bits: then twice 64 bytes, of 16 inputs each: bits 2 * c and 2 * c + 1 of byte j are the upper two of input 4 * c + j
//
// and then 16 scales and, where there are such, 16 least values; of superblocks as bytes, and of 6 bits 16 scales of the
// first halves and 16 of the second. Before the first group of a superblock are the 16 numbers in fp16 that the scales
// are multiplied with, and those of the least values, where there are such. Outputs beyond the last are zeros.
constexpr int kGroup = 32, kTileOfOutputs = 16, kGroupsOfSuper = 8;

static constexpr bool is_super(Packing packing) { return scaling_of(packing) >= Scaling::kSuperLeast; }
static constexpr bool has_leasts(Packing packing) {
    return scaling_of(packing) == Scaling::kLeast || scaling_of(packing) == Scaling::kSuperLeast;
}
static constexpr std::int64_t quants_of_group(Packing packing) {
    return kGroup * kTileOfOutputs * bits_of(packing) / 8;
}
static constexpr std::int64_t bytes_of_group(Packing packing) {
    return quants_of_group(packing) + 2 * kTileOfOutputs * (scaling_of(packing) == Scaling::kLeast ? 2 : 1);
}
static constexpr std::int64_t head_of_super(Packing packing) {
    return is_super(packing) ? 2 * kTileOfOutputs * (has_leasts(packing) ? 2 : 1) : 0;
}
// Where in a tile a superblock begins. Without superblocks as many groups are only counted together.
static constexpr std::int64_t start_of_super(Packing packing, std::int64_t super) {
    return super * (head_of_super(packing) + kGroupsOfSuper * bytes_of_group(packing));
}
// Where in a tile a group begins.
static constexpr std::int64_t start_of_group(Packing packing, std::int64_t group) {
    return start_of_super(packing, group / kGroupsOfSuper) + head_of_super(packing) +
           group % kGroupsOfSuper * bytes_of_group(packing);
}
static constexpr std::int64_t tiles_of(std::int64_t out) { return (out + kTileOfOutputs - 1) / kTileOfOutputs; }
static constexpr std::int64_t bytes_of_tile(Packing packing, std::int64_t in) {
    return start_of_group(packing, in / kGroup) - head_of_super(packing);
}
static constexpr std::int64_t bytes_of(Packing packing, std::int64_t in, std::int64_t out) {
    return tiles_of(out) * bytes_of_tile(packing, in);
}

// Rows of x in groups of 32 whole numbers from -127 to 127 and a scale, whatever their number. Group by group: the
// numbers [groups, rows, 32], the scales and the groups' sums, scale included, [groups, rows], and the sums of the numbers
// of each half of a group [groups, rows, 2].
struct Quantized {
    std::int8_t* q;
    float *scale, *sum;
    std::int32_t* halves;
};

// y = x Wᵀ + b with a packed weight, of any number of rows.
struct PackedProduct {
    Product product;  // whose weight is packed
    Packing packing;
};

// Keys that are scored at a time, and rows of queries that are computed together.
constexpr int kTileKeys = 64, kBlockRows = 6;

// Rows by their places in a tile, which are asked of memory while others are computed with: none, or kTileKeys. Blocks lie
// anywhere, so that no hardware foresees where the next one is.
struct Ahead {
    const std::byte* const* rows;
    std::int64_t bytes;  // of a row

    void fetch(int place) const {
        for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(rows[place] + line);
    }
};

// One instruction set. The functions work on the calling thread; each but the first on a range of rows or outputs.
struct Path {
    const char* name;
    std::int64_t step;  // how many weights of a row are taken at once

    // Widens x to fp32 in the order that `multiply` reads, each row filled up with zeros to a multiple of `step`.
    void (*arrange[kNumDTypes])(const Product&, float* arranged);

    // Computes y[:, begin:end].
    void (*multiply[kNumDTypes])(const Product&, const float* arranged, std::int64_t begin, std::int64_t end);

    // Compute y[begin:end].
    void (*normalize[kNumDTypes])(const Norm&, std::int64_t begin, std::int64_t end);
    void (*rotate[kNumDTypes])(const Rotation&, std::int64_t begin, std::int64_t end);
    void (*gate[kNumDTypes])(const Gated&, std::int64_t begin, std::int64_t end);
    void (*add_to[kNumDTypes])(const Sum&, std::int64_t begin, std::int64_t end);
    void (*multiply_by[kNumDTypes])(std::byte* x, float factor, std::int64_t begin, std::int64_t end);
    void (*to_floats[kNumDTypes])(const std::byte* x, float* y, std::int64_t begin, std::int64_t end);

    // What attention is made of. `rows` are rows of K or of V by their places in a tile, of which places begin to end are
    // read; x, sums and widened rows are in fp32, `stride` apart, which is the width filled up to whole steps. Values are in
    // the order that their dtype is widened in: at place i of a step is number order[dtype][i] of it.
    const int* order[kNumDTypes];
    // Lays keys side by side, in panels of 2 * step places: [panels, stride, 2 * step]. Begin and end are rounded outwards to
    // what `score` takes at once.
    void (*turn[kNumDTypes])(const std::byte* const* rows, int begin, int end, std::int64_t width, float* keys,
                             const Ahead& ahead);
    void (*score)(const float* x, std::int64_t count, std::int64_t width, const float* keys, int begin, int end,
                  float* scores);  // [count, kTileKeys]
    // Widens values, which may then be added as rows of fp32 of stride numbers: [kTileKeys, stride].
    void (*widen[kNumDTypes])(const std::byte* const* rows, int begin, int end, std::int64_t width, float* values);
    void (*add[kNumDTypes])(const float* weights, std::int64_t count, std::int64_t width, const std::byte* const* rows,
                            int begin, int end, float* sums, const Ahead& ahead);  // [count, stride]
    // Keys of tokens of a packed block, side by side as `turn` lays them, from a place of a panel on; and values, as rows.
    // Meanwhile `next` is asked of memory.
    void (*unseal_keys)(const Sealed&, const std::byte* block, int first, int count, int place, float* keys, Stream next);
    void (*unseal_values)(const Sealed&, const std::byte* block, int first, int count, std::int64_t stride, float* values,
                          Stream next);
    // Whether packed keys and values of this shape are read as they lie, and how: as `score` and `add` would read what the
    // two above have unpacked. Scores are those of a whole block, values of some of its tokens; x, weights and sums are as
    // above, the weights from the first token's place on, and values in their order.
    bool (*scores_sealed)(const Sealed&);
    void (*score_sealed)(const Sealed&, const std::byte* block, const float* x, std::int64_t count, float* scores, Stream next);
    bool (*adds_sealed)(const Sealed&);
    void (*add_sealed)(const Sealed&, const std::byte* block, int first, int tokens, const float* weights,
                       std::int64_t count, float* sums, Stream next);
    // Makes one head's scores weights, exp(score - greatest), where `greatest` rises to their greatest and `sum` is added
    // to. Returns the factor by which what was summed with a smaller one is to be multiplied.
    float (*weigh)(float* scores, int begin, int end, float softcap, float& greatest, float& sum);

    // Products with packed weights: quantizes rows begin to end of x, and computes y of tiles begin to end.
    void (*quantize[kNumDTypes])(const Product&, const Quantized&, std::int64_t begin, std::int64_t end);
    void (*multiply_packed[kNumPackings])(const Product&, DType, const Quantized&, std::int64_t begin, std::int64_t end);
};

extern const Path portable;
#ifdef KVINE_X86
extern const Path avx2, avx512, avx512vnni;
#ifdef KVINE_AVXVNNI
extern const Path avxvnni;
#endif
#endif

// The paths that this CPU and its system run, the fastest first.
std::vector<const Path*> paths_here();

// Bytes of weights that a product reads from memory.
std::int64_t weight_bytes(DType dtype, const Product& product);

// Each computes y on up to `num_threads` threads. A sum is one of fp32, rounded once, in an order that depends on the
// path and on its length alone: not on the other rows, and not on the number of threads. Where nothing is summed, all
// paths give the same bits.
void linear(const Path& path, DType dtype, const Product& product, int num_threads);
void rms_norm(const Path& path, DType dtype, const Norm& norm, int num_threads);
void rotate(const Path& path, DType dtype, const Rotation& rotation, int num_threads);
void gate(const Path& path, DType dtype, const Gated& task, std::int64_t count, int num_threads);
void decode(const Path& path, const Decode& task, int num_threads);
// Cosines and sines [rows, 2 * count] of rows begin to end, computed in double: the cosines twice, the sines once with
// a minus and once with a plus.
void cos_sin(const Angles& angles, const std::int64_t* positions, float* cos, float* sin, std::int64_t begin,
             std::int64_t end);
void prefill(const Path& path, const Prefill& task, int num_threads);
void write(const Write& task);  // fp16 ends at 65,504, which is what is stored of anything beyond
void packed_linear(const Path& path, DType dtype, const PackedProduct& task, int num_threads);

// Packs a weight [out, in] from GGUF's blocks without loss. Row i of the weight is row order[i] of the blocks, or row i
// where there is no order.
void pack(Packing packing, const std::byte* blocks, const std::int64_t* order, std::byte* packed, std::int64_t in,
          std::int64_t out, int num_threads);

// Packs a weight [out, in] of any numbers, with the loss of rounding: to k8Bit or k4BitLeast.
void round_and_pack(Packing packing, DType dtype, const std::byte* weight, std::byte* packed, std::int64_t in,
                    std::int64_t out, int num_threads);

// Rows `ids` of a packed weight in a dtype, [count, in].
void unpack_rows(Packing packing, const std::byte* packed, std::int64_t in, const std::int64_t* ids, std::int64_t count,
                 DType dtype, std::byte* rows, int num_threads);

// Bytes of K and V that attention reads at most.
std::int64_t context_bytes(const Decode& task);

// Attention by a team (team.hpp): each member calls it, and on return all of y is there. `floats` is room for as many
// numbers as `partial_floats` says.
std::int64_t partial_floats(const Path& path, const Decode& task);
void decode_in_team(const Path& path, const Decode& task, float* floats);

// Products of a query's numbers with a key's, at most and sinks aside.
std::int64_t products_of(const Prefill& task);

}  // namespace kvine
