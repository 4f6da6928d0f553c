// kvine.kernels._native: takes addresses and sizes, so that a call costs no conversion of tensors; _native.pyi types it.
#include <nanobind/nanobind.h>

#include <optional>

#include "linear.hpp"

namespace nb = nanobind;
using namespace kvine;

namespace {

// Releasing the interpreter's lock costs about 10 µs, and more beside a busy thread: only for what takes over 100 µs.
constexpr std::int64_t kLongRead = 4 << 20;

void linear_at(const Path& path, int dtype, std::uintptr_t x, std::uintptr_t weight, std::uintptr_t bias,
               std::uintptr_t y, std::int64_t rows, std::int64_t in, std::int64_t out, int num_threads) {
    if (dtype < 0 || dtype >= kNumDTypes) throw nb::value_error("no such dtype");
    const Product product{reinterpret_cast<const std::byte*>(x),
                          reinterpret_cast<const std::byte*>(weight),
                          reinterpret_cast<const std::byte*>(bias),
                          reinterpret_cast<std::byte*>(y),
                          rows,
                          in,
                          out};
    std::optional<nb::gil_scoped_release> released;
    if (weight_bytes(DType(dtype), product) > kLongRead) released.emplace();
    linear(path, DType(dtype), product, num_threads);
}

// The paths that this CPU runs, the fastest first.
nb::list paths() {
    nb::list found;
#ifdef KVINE_X86
    for (const Path* path : {&avx512, &avx2})
        if (runs_here(*path)) found.append(nb::cast(path, nb::rv_policy::reference));
#endif
    found.append(nb::cast(&portable, nb::rv_policy::reference));
    return found;
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a program may end while a model is alive
    m.attr("FP32") = static_cast<int>(kFp32);
    m.attr("BF16") = static_cast<int>(kBf16);
    m.attr("FP16") = static_cast<int>(kFp16);
    nb::class_<Path>(m, "Path").def_ro("name", &Path::name).def("linear", &linear_at);
    m.def("paths", &paths);
}
