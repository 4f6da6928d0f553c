// A whole decoder in one call, for steps in which each request has one query.
#pragma once

#include <vector>

#include "kernels.hpp"

namespace kvine {

// A weight, exact or packed, and its bias.
struct Weight {
    const std::byte* weight;
    const std::byte* bias;  // [out], or null
    std::int64_t in, out;
    int packing;  // a Packing, or kExact
};
constexpr int kExact = -1;

// One layer: norms of which the architecture may lack those that are null, products, and where its past is kept.
struct Layer {
    const float *attn_norm, *q_norm, *k_norm, *post_attn_norm, *mlp_norm, *post_mlp_norm;
    Weight q, k, v, o, gate, up, down;
    std::byte *keys, *values;  // see Decode
    const std::byte *sealed_keys, *sealed_values;  // of full blocks where they are packed, or null
    std::size_t kind;
};

// What layers of one kind have in common: how positions turn them, and where their past is kept.
struct Kind {
    Angles angles;
    std::int64_t block_size, num_blocks;
    DType k_dtype, v_dtype;
    std::size_t group;  // of layers that share block tables
    bool packed = false;  // see Decode
    Sealed sealed_keys{}, sealed_values{};
    std::int64_t num_sealed = 0;
};

struct Stack {
    const Path* path;
    DType dtype;
    std::int64_t hidden, heads, kv_heads, width;
    float eps, scale, softcap;
    Gated::Activation activation;
    Weight embedding, head;
    float embedding_scale;  // 1 for none
    const float* final_norm;
    std::vector<Kind> kinds;
    std::vector<Layer> layers;
};

// One token of each of `rows` requests, and the logits that are wanted of them.
struct StackStep {
    const std::int64_t* ids;                             // [rows]
    std::int64_t rows;
    std::vector<const Decode::Request*> requests;        // of each group; behind its `rows` requests lie the tables
    const std::int64_t* wanted;                          // [num_wanted] rows, ascending
    std::int64_t num_wanted;
    float* logits;                                       // [num_wanted, vocabulary]
};

// Writes K and V of the step's tokens and computes its logits. They equal what the kernels give when they are called one
// by one, bit for bit. Everything that names a row or a block is checked by the caller.
void run(const Stack& stack, const StackStep& step, int num_threads);

// A step's attention in layers of one kind, but for what differs from layer to layer: q, q_sink, k, v and y.
Decode attention_of(const Stack& stack, const Kind& kind, const StackStep& step);

}  // namespace kvine
