// All kernels of one instruction set, from its `Lanes` (lanes.hpp).
#pragma once

#include <array>

#include "attend.hpp"
#include "multiply.hpp"
#include "multiply_packed.hpp"
#include "row_loops.hpp"
#include "sealed_attend.hpp"

namespace {

template <class Lanes, class Format>
constexpr auto make_order() {
    std::array<int, kStep<Lanes>> order{};
    for (int i = 0; i < kStep<Lanes>; ++i) order[i] = Lanes::template place<Format>(i);
    return order;
}

template <class Lanes, class Format>
constexpr auto kOrder = make_order<Lanes, Format>();

template <class Lanes, class PackedLanes>
constexpr kvine::Path make_path(const char* name) {
    return {
        name,
        kStep<Lanes>,
        {arrange<Lanes, Fp32>, arrange<Lanes, Bf16>, arrange<Lanes, Fp16>},
        {multiply<Lanes, Fp32>, multiply<Lanes, Bf16>, multiply<Lanes, Fp16>},
        {normalize<Lanes, Fp32>, normalize<Lanes, Bf16>, normalize<Lanes, Fp16>},
        {rotate<Lanes, Fp32>, rotate<Lanes, Bf16>, rotate<Lanes, Fp16>},
        {gate<Fp32>, gate<Bf16>, gate<Fp16>},
        {add_to<Fp32>, add_to<Bf16>, add_to<Fp16>},
        {multiply_by<Fp32>, multiply_by<Bf16>, multiply_by<Fp16>},
        {to_floats<Fp32>, to_floats<Bf16>, to_floats<Fp16>},
        {kOrder<Lanes, Fp32>.data(), kOrder<Lanes, Bf16>.data(), kOrder<Lanes, Fp16>.data()},
        {turn<Lanes, Fp32>, turn<Lanes, Bf16>, turn<Lanes, Fp16>},
        score<Lanes>,
        {widen_rows<Lanes, Fp32>, widen_rows<Lanes, Bf16>, widen_rows<Lanes, Fp16>},
        {add<Lanes, Fp32>, add<Lanes, Bf16>, add<Lanes, Fp16>},
        unseal_keys<Lanes>,
        unseal_values<Lanes>,
        scores_sealed<Lanes>,
        score_sealed<Lanes>,
        adds_sealed<Lanes>,
        add_sealed<Lanes>,
        weigh<Lanes>,
        {quantize<Fp32>, quantize<Bf16>, quantize<Fp16>},
        {multiply_packed<PackedLanes, kvine::k8Bit>, multiply_packed<PackedLanes, kvine::k4Bit>,
         multiply_packed<PackedLanes, kvine::k4BitLeast>, multiply_packed<PackedLanes, kvine::k5Bit>,
         multiply_packed<PackedLanes, kvine::k5BitLeast>, multiply_packed<PackedLanes, kvine::k4BitSuper>,
         multiply_packed<PackedLanes, kvine::k5BitSuper>, multiply_packed<PackedLanes, kvine::k6BitSuper>},
    };
}

}  // namespace
