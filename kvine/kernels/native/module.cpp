// kvine.kernels._native: takes addresses and sizes, so that a call costs no conversion of tensors; _native.pyi types it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels.hpp"
#include "machine.hpp"
#include "stack.hpp"

namespace nb = nanobind;
using namespace kvine;

namespace {

// Releasing the interpreter's lock costs about 10 µs, and more beside a busy thread: only for what takes over 100 µs.
constexpr std::int64_t kLongRead = 4 << 20;
constexpr std::int64_t kManyNumbers = 128 << 10;
constexpr std::int64_t kManyProducts = 1 << 20;

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

Packing checked_packing(int packing) {
    if (packing < 0 || packing >= kNumPackings) throw nb::value_error("no such packing");
    return Packing(packing);
}

// A weight that stays where it is, bound once: what changes from call to call is then little.
struct BoundProduct {
    const Path* path;
    DType dtype;
    Weight weight;

    void operator()(std::uintptr_t x, std::uintptr_t y, std::int64_t rows, int num_threads) const {
        const Product call{at(x), weight.weight, weight.bias, into(y), rows, weight.in, weight.out};
        if (weight.packing == kExact) {
            run(weight_bytes(dtype, call) * rows > kLongRead, [&] { linear(*path, dtype, call, num_threads); });
        } else {
            const PackedProduct packed{call, Packing(weight.packing)};
            run(bytes_of(packed.packing, weight.in, weight.out) * rows > kLongRead,
                [&] { packed_linear(*path, dtype, packed, num_threads); });
        }
    }
};

BoundProduct bind(const Path& path, int dtype, std::uintptr_t weight, std::uintptr_t bias, std::int64_t in,
                  std::int64_t out) {
    return {&path, checked(dtype), {at(weight), at(bias), in, out, kExact}};
}

BoundProduct bind_packed(const Path& path, int dtype, int packing, std::uintptr_t weight, std::uintptr_t bias,
                         std::int64_t in, std::int64_t out) {
    return {&path, checked(dtype), {at(weight), at(bias), in, out, checked_packing(packing)}};
}

void pack_at(int packing, std::uintptr_t blocks, std::uintptr_t order, std::uintptr_t packed, std::int64_t in,
             std::int64_t out, int num_threads) {
    const Packing kind = checked_packing(packing);
    run(true, [&] {
        pack(kind, at(blocks), reinterpret_cast<const std::int64_t*>(order), into(packed), in, out, num_threads);
    });
}

void round_and_pack_at(int packing, int dtype, std::uintptr_t weight, std::uintptr_t packed, std::int64_t in,
                       std::int64_t out, int num_threads) {
    const Packing kind = checked_packing(packing);
    const DType format = checked(dtype);
    if (kind != k8Bit && kind != k4BitLeast) throw nb::value_error("only GGUF's blocks are packed so");
    run(true, [&] { round_and_pack(kind, format, at(weight), into(packed), in, out, num_threads); });
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

Gated::Activation checked_activation(int activation) {
    if (activation < 0 || activation >= Gated::kNumActivations) throw nb::value_error("no such activation");
    return Gated::Activation(activation);
}

void gate_at(const Path& path, int dtype, int activation, std::uintptr_t gated, std::uintptr_t up, std::int64_t count,
             int num_threads) {
    const Gated task{at(gated), at(up), into(gated), checked_activation(activation)};
    const DType format = checked(dtype);
    run(count > kManyNumbers, [&] { gate(path, format, task, count, num_threads); });
}

void check_cache_rows(const std::int64_t* rows, std::int64_t count, std::int64_t num_rows) {
    for (std::int64_t i = 0; i < count; ++i)
        if (rows[i] < 0 || rows[i] >= num_rows) throw nb::index_error("no such row in the cache");
}

void write_at(std::tuple<int, int, int> dtypes, std::uintptr_t k, std::uintptr_t v, std::uintptr_t rows,
              std::uintptr_t k_to, std::uintptr_t v_to, std::int64_t count, std::int64_t width,
              std::int64_t num_rows) {
    const auto [dtype, k_dtype, v_dtype] = dtypes;
    const Write task{at(k),     at(v),          reinterpret_cast<const std::int64_t*>(rows),
                     into(k_to), into(v_to),    count,
                     width,      checked(dtype), checked(k_dtype),
                     checked(v_dtype)};
    check_cache_rows(task.rows, count, num_rows);
    run(count * width > kManyNumbers, [&] { write(task); });
}

// Raises if a query sees a key in a block that there is not: an address must not be made of it.
template <class AnyRequest>
void check_blocks(const Decode& task, const AnyRequest& request, std::int64_t start, std::int64_t length,
                  std::int64_t num_blocks) {
    const std::int64_t* table = task.tables + request.table;
    const auto check = [&](std::int64_t first, std::int64_t end) {
        for (std::int64_t block = first; block < end; ++block)
            if (table[block] < 0 || table[block] >= num_blocks) throw nb::index_error("no such block in the cache");
    };
    const auto blocks = [&](std::int64_t keys) { return (keys + task.block_size - 1) / task.block_size; };
    check(0, blocks(std::min(request.sinks, length)));
    for (const Run* run = task.kept(request); run != task.kept(request) + request.num_kept; ++run)
        check(run->begin / task.block_size, blocks(std::min({run->end, start, length})));
    check(start / task.block_size, blocks(length));
}

// How full blocks are packed, and where those of a layer lie, [num_blocks, kv_heads, bytes]. For keys and for values: bits,
// whether by channel, channels that share a scale, and bytes of a head.
struct PackedBlocks {
    std::int64_t num_blocks;
    std::array<std::int64_t, 4> keys, values;
    std::uintptr_t sealed_k, sealed_v, new_k, new_v;
};

Sealed sealed_part(const std::array<std::int64_t, 4>& part, std::int64_t block_size, std::int64_t width) {
    return {static_cast<int>(part[0]), part[1] != 0, part[2], block_size, width, part[3]};
}

void add_packed(Decode& task, const std::optional<PackedBlocks>& packed) {
    if (!packed) return;
    task.packed = true;
    task.sealed_keys = sealed_part(packed->keys, task.block_size, task.width);
    task.sealed_values = sealed_part(packed->values, task.block_size, task.width);
    task.sealed_k = at(packed->sealed_k), task.sealed_v = at(packed->sealed_v);
    task.new_k = at(packed->new_k), task.new_v = at(packed->new_v);
}

// The same where full blocks are packed: those before that of the last of `length` keys.
template <class AnyRequest>
void check_packed_blocks(const Decode& task, const AnyRequest& request, std::int64_t start, std::int64_t num_sealed) {
    const std::int64_t before = (request.length - 1) / task.block_size * task.block_size;
    if (before > 0) check_blocks(task, request, std::min(start, before), before, num_sealed);
}

void check_block(std::int64_t block, std::int64_t num_blocks) {
    if (block < 0 || block >= num_blocks) throw nb::index_error("no such block in the cache");
}

void check_query(const Decode& task, const Decode::Request& request, std::int64_t num_blocks, std::int64_t num_sealed) {
    if (!task.packed) return check_blocks(task, request, request.start, request.length, num_blocks);
    check_block(task.tables[request.table + (request.length - 1) / task.block_size], num_blocks);
    check_packed_blocks(task, request, request.start, num_sealed);
}

// `plan` is [num_requests, 8], the fields of Decode::Request, and behind it the tables.
void decode_at(const Path& path, std::tuple<int, int, int> dtypes, std::uintptr_t q, std::uintptr_t q_sink,
               std::uintptr_t k, std::uintptr_t v, std::uintptr_t y, std::uintptr_t plan, std::int64_t num_requests,
               std::int64_t kv_heads, std::int64_t group, std::int64_t width, std::int64_t block_size,
               std::int64_t num_blocks, float scale, float softcap,
               const std::optional<PackedBlocks>& packed, int num_threads) {
    const auto [dtype, k_dtype, v_dtype] = dtypes;
    static_assert(sizeof(Decode::Request) == 8 * sizeof(std::int64_t));
    const auto* requests = reinterpret_cast<const Decode::Request*>(plan);
    const auto* tables = reinterpret_cast<const std::int64_t*>(requests + num_requests);
    Decode task{at(q),        at(q_sink), at(k), at(v), into(y),    requests, tables, num_requests,   kv_heads,
                group,        width,      block_size,   scale,      softcap,  checked(dtype),
                checked(k_dtype), checked(v_dtype)};
    add_packed(task, packed);
    for (const auto* request = requests; request != requests + num_requests; ++request)
        check_query(task, *request, num_blocks, packed ? packed->num_blocks : 0);
    run(context_bytes(task) > kLongRead, [&] { decode(path, task, num_threads); });
}

Stack make_stack(const Path& path, int dtype, std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> sizes,
                 float eps, float scale, float softcap, int activation, const BoundProduct& embedding,
                 float embedding_scale, std::uintptr_t final_norm, const BoundProduct& head) {
    const auto [hidden, heads, kv_heads, width] = sizes;
    return {&path,           checked(dtype),  hidden,          heads,       kv_heads,
            width,           eps,             scale,           softcap,     checked_activation(activation),
            embedding.weight, head.weight,    embedding_scale, floats_at(final_norm), {}, {}};
}

void add_kind(Stack& stack, std::uintptr_t frequencies, std::int64_t count, double scaling, std::int64_t block_size,
              std::int64_t num_blocks, std::tuple<int, int> dtypes, std::size_t group) {
    const auto [k_dtype, v_dtype] = dtypes;
    stack.kinds.push_back({{reinterpret_cast<const double*>(frequencies), count, scaling}, block_size, num_blocks,
                           checked(k_dtype), checked(v_dtype), group});
}

// How the last kind's full blocks are packed; see PackedBlocks.
void pack_kind(Stack& stack, std::int64_t num_blocks, const std::array<std::int64_t, 4>& keys,
               const std::array<std::int64_t, 4>& values) {
    if (stack.kinds.empty()) throw nb::index_error("no such kind of layers");
    Kind& kind = stack.kinds.back();
    kind.packed = true, kind.num_sealed = num_blocks;
    kind.sealed_keys = sealed_part(keys, kind.block_size, stack.width);
    kind.sealed_values = sealed_part(values, kind.block_size, stack.width);
}

// `norms` and `products` are in the order of Layer's fields.
void add_layer(Stack& stack, const std::array<std::uintptr_t, 6>& norms,
               const std::array<const BoundProduct*, 7>& products, std::uintptr_t keys, std::uintptr_t values,
               std::uintptr_t sealed_keys, std::uintptr_t sealed_values, std::size_t kind) {
    if (kind >= stack.kinds.size()) throw nb::index_error("no such kind of layers");
    const auto norm = [&](int i) { return norms[i] ? floats_at(norms[i]) : nullptr; };
    const auto weight = [&](int i) { return products[i]->weight; };
    stack.layers.push_back({norm(0),   norm(1),   norm(2),   norm(3),   norm(4),   norm(5),      weight(0),    weight(1),
                            weight(2), weight(3), weight(4), weight(5), weight(6), into(keys), into(values), at(sealed_keys),
                            at(sealed_values), kind});
}

// `plan` is int64: the tokens' ids, the wanted rows, and then, where `groups` say, each group's part (see decode_at).
void run_stack(const Stack& stack, std::uintptr_t plan, std::int64_t rows, std::int64_t num_wanted,
               const std::vector<std::int64_t>& groups, std::uintptr_t logits, int num_threads) {
    const auto* ids = reinterpret_cast<const std::int64_t*>(plan);
    StackStep step{ids, rows, {}, ids + rows, num_wanted, reinterpret_cast<float*>(logits)};
    for (const std::int64_t at : groups) step.requests.push_back(reinterpret_cast<const Decode::Request*>(ids + at));
    for (std::int64_t row = 0; row < rows; ++row)
        if (ids[row] < 0 || ids[row] >= stack.embedding.out) throw nb::index_error("no such token");
    for (std::int64_t i = 0; i < num_wanted; ++i)
        if (step.wanted[i] < 0 || step.wanted[i] >= rows) throw nb::index_error("no such row");
    for (const Kind& kind : stack.kinds) {
        if (kind.group >= groups.size()) throw nb::index_error("no such group");
        const Decode attention = attention_of(stack, kind, step);
        for (const auto* request = attention.requests; request != attention.requests + rows; ++request)
            check_query(attention, *request, kind.num_blocks, kind.num_sealed);
    }
    run(true, [&] { run(stack, step, num_threads); });
}

void cos_sin_at(std::uintptr_t frequencies, std::int64_t count, double scaling, std::uintptr_t positions,
                std::int64_t rows, std::uintptr_t cos, std::uintptr_t sin) {
    const Angles angles{reinterpret_cast<const double*>(frequencies), count, scaling};
    run(rows * count > kManyNumbers / 16, [&] {
        cos_sin(angles, reinterpret_cast<const std::int64_t*>(positions), reinterpret_cast<float*>(cos),
             reinterpret_cast<float*>(sin), 0, rows);
    });
}

// The same of requests with any number of queries; `plan` has the fields of Prefill::Request.
void prefill_at(const Path& path, std::tuple<int, int, int> dtypes, std::uintptr_t q, std::uintptr_t q_sink,
                std::uintptr_t k, std::uintptr_t v, std::uintptr_t y, std::uintptr_t plan, std::int64_t num_requests,
                std::int64_t kv_heads, std::int64_t group, std::int64_t width, std::int64_t block_size,
                std::int64_t num_blocks, std::int64_t window, float scale, float softcap,
                const std::optional<PackedBlocks>& packed, int num_threads) {
    const auto [dtype, k_dtype, v_dtype] = dtypes;
    static_assert(sizeof(Prefill::Request) == 7 * sizeof(std::int64_t));
    const auto* requests = reinterpret_cast<const Prefill::Request*>(plan);
    const auto* tables = reinterpret_cast<const std::int64_t*>(requests + num_requests);
    Decode each{at(q),        at(q_sink), at(k), at(v), into(y),    nullptr, tables, 0,   kv_heads,
                group,        width,      block_size,   scale,      softcap,  checked(dtype),
                checked(k_dtype), checked(v_dtype)};
    add_packed(each, packed);
    const Prefill task{each, requests, num_requests, window};
    for (const auto* request = requests; request != requests + num_requests; ++request) {
        const std::int64_t first = request->length - request->queries;
        const std::int64_t start = window ? std::max<std::int64_t>(first - window + 1, 0) : 0;
        if (!packed) {
            check_blocks(each, *request, start, request->length, num_blocks);
            continue;
        }
        check_packed_blocks(each, *request, start, packed->num_blocks);
        const std::int64_t behind = request->table + (request->length + block_size - 1) / block_size;
        if (first % block_size) check_block(tables[behind], num_blocks);
    }
    run(products_of(task) > kManyProducts, [&] { prefill(path, task, num_threads); });
}

std::uint64_t fetch_all_at(std::uintptr_t data, std::int64_t size, int streams, int num_threads) {
    std::uint64_t seen = 0;
    run(true, [&] { seen = fetch_all(at(data), size, streams, num_threads); });
    return seen;
}

nb::list paths() {
    nb::list found;
    for (const Path* path : paths_here()) found.append(nb::cast(path, nb::rv_policy::reference));
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
    m.attr("Q5_0") = static_cast<int>(k5Bit);
    m.attr("Q5_1") = static_cast<int>(k5BitLeast);
    m.attr("Q4_K") = static_cast<int>(k4BitSuper);
    m.attr("Q5_K") = static_cast<int>(k5BitSuper);
    m.attr("Q6_K") = static_cast<int>(k6BitSuper);
    nb::class_<Path>(m, "Path")
        .def_ro("name", &Path::name)
        .def("linear", &bind)
        .def("packed_linear", &bind_packed)
        .def("rms_norm", &rms_norm_at)
        .def("rotate", &rotate_at)
        .def("gate", &gate_at)
        .def("decode", &decode_at)
        .def("prefill", &prefill_at)
        .def("stack", &make_stack);
    nb::class_<PackedBlocks>(m, "PackedBlocks")
        .def(nb::init<std::int64_t, std::array<std::int64_t, 4>, std::array<std::int64_t, 4>, std::uintptr_t,
                      std::uintptr_t, std::uintptr_t, std::uintptr_t>());
    nb::class_<BoundProduct>(m, "Product").def("__call__", &BoundProduct::operator());
    nb::class_<Stack>(m, "Stack").def("add_kind", &add_kind).def("pack_kind", &pack_kind).def("add_layer", &add_layer).def("run", &run_stack);
    m.attr("SILU") = static_cast<int>(Gated::kSilu);
    m.attr("GELU_TANH") = static_cast<int>(Gated::kGeluTanh);
    m.def("cos_sin", &cos_sin_at);
    m.def("write", &write_at);
    m.def("pack", &pack_at);
    m.def("round_and_pack", &round_and_pack_at);
    m.def("packed_bytes", &packed_bytes);
    m.def("unpack_rows", &unpack_rows_at);
    m.def("fetch_all", &fetch_all_at);
    m.def("paths", &paths);
}
