// A product of a few rows with a weight, y = x Wᵀ + b: what it takes, and the instruction sets that it is compiled for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvine {

enum DType : int { kFp32, kBf16, kFp16, kNumDTypes };

// All matrices are row-major and contiguous, in one dtype, at any address.
struct Product {
    const std::byte* x;       // [rows, in]
    const std::byte* weight;  // [out, in]
    const std::byte* bias;    // [out], or null
    std::byte* y;             // [rows, out]
    std::int64_t rows, in, out;
};

// The product in one instruction set, by dtype.
struct Path {
    const char* name;
    std::int64_t step;  // how many weights of a row are taken at once

    // Widens x to fp32 in the order that `multiply` reads, each row filled up with zeros to a multiple of `step`.
    void (*arrange[kNumDTypes])(const Product& product, float* arranged);

    // Computes y[:, begin:end] on the calling thread.
    void (*multiply[kNumDTypes])(const Product& product, const float* arranged, std::int64_t begin, std::int64_t end);
};

extern const Path portable;
#ifdef KVINE_X86
extern const Path avx2, avx512;
#endif

// Whether this CPU and its system run the path.
bool runs_here(const Path& path);

// Bytes of weights that a product reads from memory.
std::int64_t weight_bytes(DType dtype, const Product& product);

// Computes y on up to `num_threads` threads. Each element of y is one sum, in fp32 and rounded once, in an order that
// depends on the path and on `in` alone: not on the other rows, and not on the number of threads.
void linear(const Path& path, DType dtype, const Product& product, int num_threads);

}  // namespace kvine
