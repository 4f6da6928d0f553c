// Which paths this CPU runs, and a product shared out among threads.
#include <vector>

#include "kernels.hpp"
#include "team.hpp"

#ifdef KVINE_X86
#include <cpuid.h>
#endif

namespace kvine {
namespace {

constexpr std::size_t kCacheLineFloats = 16;

#ifdef KVINE_X86
// What not every compiler lets __builtin_cpu_supports ask for.
bool has_f16c() {
    unsigned eax, ebx, ecx = 0, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

#ifdef KVINE_AVXVNNI
bool has_avxvnni() {
    unsigned eax = 0, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#endif
#endif

// Room for x in fp32: the calling thread's own, kept from call to call.
float* scratch(std::size_t count) {
    thread_local std::vector<float> buffer;
    if (buffer.size() < count + kCacheLineFloats) buffer.resize(count + kCacheLineFloats);
    const auto misplaced = reinterpret_cast<std::uintptr_t>(buffer.data()) / sizeof(float) % kCacheLineFloats;
    return buffer.data() + (kCacheLineFloats - misplaced);
}

}  // namespace

std::vector<const Path*> paths_here() {
    std::vector<const Path*> paths;
#ifdef KVINE_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
        if (__builtin_cpu_supports("avx512f")) {
            if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni")) paths.push_back(&avx512vnni);
            paths.push_back(&avx512);
        }
#ifdef KVINE_AVXVNNI
        if (has_avxvnni()) paths.push_back(&avxvnni);
#endif
        paths.push_back(&avx2);
    }
#endif
    paths.push_back(&portable);
    return paths;
}

std::int64_t weight_bytes(DType dtype, const Product& product) {
    return product.out * product.in * size_of(dtype);
}

void linear(const Path& path, DType dtype, const Product& product, int num_threads) {
    const std::int64_t stride = (product.in + path.step - 1) / path.step * path.step;
    float* arranged = scratch(static_cast<std::size_t>(product.rows * stride));
    path.arrange[dtype](product, arranged);

    share(product.out, weight_bytes(dtype, product) / kLeastBytesOfThread, num_threads,
          [&](std::int64_t begin, std::int64_t end) { path.multiply[dtype](product, arranged, begin, end); });
}

}  // namespace kvine
