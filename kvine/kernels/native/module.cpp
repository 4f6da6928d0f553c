// kvine.kernels._native: takes addresses and sizes, so that a call costs no conversion of tensors; _native.pyi types it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "kernels.hpp"
#include "machine.hpp"

namespace nb = nanobind;
using namespace kvine;

namespace {

// Releasing the interpreter's lock costs about 10 µs, and more beside a busy thread: only for what takes over 100 µs.
constexpr std::int64_t kLongRead = 4 << 20;
constexpr std::int64_t kManyNumbers = 128 << 10;

DType checked(int dtype) {
    if (dtype < 0 || dtype >= kNumDTypes) throw nb::value_error("no such dtype");
    return DType(dtype);
}

const std::byte* at(std::uintptr_t address) { return reinterpret_cast<const std::byte*>(address); }
std::byte* into(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }
const float* floats_at(std::uintptr_t address) { return reinterpret_cast<const float*>(address); }

// Computes without the interpreter's lock if that pays.
template <class Compute>
void run(bool takes_long, const Compute& compute) {
    std::optional<nb::gil_scoped_release> released;
    if (takes_long) released.emplace();
    compute();
}

// A weight that stays where it is, bound once: what changes from call to call is then little.
struct BoundLinear {
    const Path* path;
    DType dtype;
    Product product;

    void operator()(std::uintptr_t x, std::uintptr_t y, std::int64_t rows, int num_threads) const {
        Product call = product;
        call.x = at(x), call.y = into(y), call.rows = rows;
        run(weight_bytes(dtype, call) * rows > kLongRead, [&] { linear(*path, dtype, call, num_threads); });
    }
};

BoundLinear bind(const Path& path, int dtype, std::uintptr_t weight, std::uintptr_t bias, std::int64_t in,
                 std::int64_t out) {
    return {&path, checked(dtype), {nullptr, at(weight), at(bias), nullptr, 0, in, out}};
}

// A packed weight, bound likewise.
struct BoundPacked {
    const Path* path;
    DType dtype;
    PackedProduct task;

    void operator()(std::uintptr_t x, std::uintptr_t y, std::int64_t rows, int num_threads) const {
        PackedProduct call = task;
        call.product.x = at(x), call.product.y = into(y), call.product.rows = rows;
        const std::int64_t work = bytes_of(call.packing, call.product.in, call.product.out) * rows;
        run(work > kLongRead, [&] { packed_linear(*path, dtype, call, num_threads); });
    }
};

Packing checked_packing(int packing) {
    if (packing < 0 || packing >= kNumPackings) throw nb::value_error("no such packing");
    return Packing(packing);
}

BoundPacked bind_packed(const Path& path, int dtype, int packing, std::uintptr_t weight, std::uintptr_t bias,
                        std::int64_t in, std::int64_t out) {
    return {&path, checked(dtype), {{nullptr, at(weight), at(bias), nullptr, 0, in, out}, checked_packing(packing)}};
}

void pack_at(int packing, std::uintptr_t blocks, std::uintptr_t order, std::uintptr_t packed, std::int64_t in,
             std::int64_t out, int num_threads) {
    const Packing kind = checked_packing(packing);
    run(true, [&] {
        pack(kind, at(blocks), reinterpret_cast<const std::int64_t*>(order), into(packed), in, out, num_threads);
    });
}

void unpack_rows_at(int packing, std::uintptr_t packed, std::int64_t in, std::int64_t out, std::uintptr_t ids,
                    std::int64_t count, int dtype, std::uintptr_t rows, int num_threads) {
    const auto* wanted = reinterpret_cast<const std::int64_t*>(ids);
    for (std::int64_t i = 0; i < count; ++i)
        if (wanted[i] < 0 || wanted[i] >= out) throw nb::index_error("no such row");
    const Packing kind = checked_packing(packing);
    const DType format = checked(dtype);
    run(count * in > kManyNumbers,
        [&] { unpack_rows(kind, at(packed), in, wanted, count, format, into(rows), num_threads); });
}

std::int64_t packed_bytes(int packing, std::int64_t in, std::int64_t out) {
    return bytes_of(checked_packing(packing), in, out);
}

void rms_norm_at(const Path& path, int dtype, std::uintptr_t x, std::uintptr_t weight, std::uintptr_t y,
                 std::int64_t rows, std::int64_t width, float eps, int num_threads) {
    const Norm norm{at(x), floats_at(weight), into(y), rows, width, eps};
    const DType format = checked(dtype);
    run(rows * width > kManyNumbers, [&] { rms_norm(path, format, norm, num_threads); });
}

void rotate_at(const Path& path, int dtype, std::uintptr_t x, std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t y,
               std::int64_t rows, std::int64_t heads, std::int64_t width, std::int64_t rotary, int num_threads) {
    const Rotation rotation{at(x), floats_at(cos), floats_at(sin), into(y), rows, heads, width, rotary};
    const DType format = checked(dtype);
    run(rows * heads * width > kManyNumbers, [&] { rotate(path, format, rotation, num_threads); });
}

void gate_at(const Path& path, int dtype, int activation, std::uintptr_t gated, std::uintptr_t up, std::int64_t count,
             int num_threads) {
    if (activation < 0 || activation >= Gated::kNumActivations) throw nb::value_error("no such activation");
    const Gated task{at(gated), at(up), into(gated), Gated::Activation(activation)};
    const DType format = checked(dtype);
    run(count > kManyNumbers, [&] { gate(path, format, task, count, num_threads); });
}

void write_at(std::tuple<int, int, int> dtypes, std::uintptr_t k, std::uintptr_t v, std::uintptr_t rows,
              std::uintptr_t k_to, std::uintptr_t v_to, std::int64_t count, std::int64_t width,
              std::int64_t num_rows) {
    const auto [dtype, k_dtype, v_dtype] = dtypes;
    const Write task{at(k),     at(v),          reinterpret_cast<const std::int64_t*>(rows),
                     into(k_to), into(v_to),    count,
                     width,      checked(dtype), checked(k_dtype),
                     checked(v_dtype)};
    for (std::int64_t i = 0; i < count; ++i)
        if (task.rows[i] < 0 || task.rows[i] >= num_rows) throw nb::index_error("no such row in the cache");
    run(count * width > kManyNumbers, [&] { write(task); });
}

// Raises if a query sees a key in a block that there is not: an address must not be made of it.
void check_blocks(const Decode& task, std::int64_t num_blocks) {
    for (std::int64_t r = 0; r < task.num_requests; ++r) {
        const Decode::Request& request = task.requests[r];
        const std::int64_t* table = task.tables + request.table;
        const auto check = [&](std::int64_t first, std::int64_t end) {
            for (std::int64_t block = first; block < end; ++block)
                if (table[block] < 0 || table[block] >= num_blocks) throw nb::index_error("no such block in the cache");
        };
        const auto blocks = [&](std::int64_t keys) { return (keys + task.block_size - 1) / task.block_size; };
        check(0, blocks(std::min(task.sinks, request.length)));
        check(request.start / task.block_size, blocks(request.length));
    }
}

// `plan` is [num_requests, 4], the fields of Decode::Request, and behind it the tables.
void decode_at(const Path& path, std::tuple<int, int, int> dtypes, std::uintptr_t q, std::uintptr_t q_sink,
               std::uintptr_t k, std::uintptr_t v, std::uintptr_t y, std::uintptr_t plan, std::int64_t num_requests,
               std::int64_t kv_heads, std::int64_t group, std::int64_t width, std::int64_t block_size,
               std::int64_t num_blocks, std::int64_t sinks, float scale, float softcap, int num_threads) {
    const auto [dtype, k_dtype, v_dtype] = dtypes;
    static_assert(sizeof(Decode::Request) == 4 * sizeof(std::int64_t));
    const auto* requests = reinterpret_cast<const Decode::Request*>(plan);
    const auto* tables = reinterpret_cast<const std::int64_t*>(requests + num_requests);
    const Decode task{at(q),        at(q_sink), at(k), at(v), into(y),    requests, tables, num_requests,   kv_heads,
                      group,        width,      block_size,   sinks,      scale,    softcap, checked(dtype),
                      checked(k_dtype), checked(v_dtype)};
    check_blocks(task, num_blocks);
    run(context_bytes(task) > kLongRead, [&] { decode(path, task, num_threads); });
}

std::uint64_t fetch_all_at(std::uintptr_t data, std::int64_t size, int streams, int num_threads) {
    std::uint64_t seen = 0;
    run(true, [&] { seen = fetch_all(at(data), size, streams, num_threads); });
    return seen;
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
    m.attr("Q8_0") = static_cast<int>(k8Bit);
    m.attr("Q4_0") = static_cast<int>(k4Bit);
    m.attr("Q4_1") = static_cast<int>(k4BitLeast);
    nb::class_<Path>(m, "Path")
        .def_ro("name", &Path::name)
        .def("linear", &bind)
        .def("packed_linear", &bind_packed)
        .def("rms_norm", &rms_norm_at)
        .def("rotate", &rotate_at)
        .def("gate", &gate_at)
        .def("decode", &decode_at);
    nb::class_<BoundLinear>(m, "Linear").def("__call__", &BoundLinear::operator());
    nb::class_<BoundPacked>(m, "PackedLinear").def("__call__", &BoundPacked::operator());
    m.attr("SILU") = static_cast<int>(Gated::kSilu);
    m.attr("GELU_TANH") = static_cast<int>(Gated::kGeluTanh);
    m.def("write", &write_at);
    m.def("pack", &pack_at);
    m.def("packed_bytes", &packed_bytes);
    m.def("unpack_rows", &unpack_rows_at);
    m.def("fetch_all", &fetch_all_at);
    m.def("paths", &paths);
}
