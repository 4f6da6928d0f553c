// Attention that reads packed blocks as they lie: numbers are unpacked in registers, scored or added there, and never
// stored. Each is what sealed.hpp makes of it, and each sum has the order of attend.hpp: the same bits.
//
// Beside what lanes.hpp says, `Lanes` bring for this:
//
//   mul(a, b)               their product
//   Ints                    a vector of whole numbers: bytes(from), width of them; bytes_twice(from), half as many and once
//                           more; shifted<n>(ints), by n bits to the right; shifted<n, m>(ints), its second half by m
//   floats<Bits>(ints)      the lowest Bits of each
//   kTables                 whether look_up(table, ints) is there: of 16 numbers those that the lowest 4 bits name
//   counted(mask)           0, 1, 2 … & mask
#pragma once

#include "sealed.hpp"

namespace {

// What codes of one group mean: with few bits and a table for them all at once.
template <class Lanes, int Bits>
struct Meaning {
    using Floats = typename Lanes::Floats;
    static constexpr bool kTable = Bits < 8 && Lanes::kTables;
    Floats scale, least;  // or the table, and nothing

    Meaning(float scale_of_all, float least_of_all) : scale(Lanes::fill(scale_of_all)), least(Lanes::fill(least_of_all)) {
        if constexpr (kTable) scale = Lanes::add(Lanes::mul(Lanes::counted((1 << Bits) - 1), scale), least);
    }

    Floats of(typename Lanes::Ints codes) const {
        if constexpr (kTable) {
            return Lanes::look_up(scale, codes);
        } else {
            return Lanes::add(Lanes::mul(Lanes::template floats<Bits>(codes), scale), least);
        }
    }
};

// Calls f(p) for p = 0 to Count - 1, each a constant.
template <int Count, class F>
[[gnu::always_inline]] inline void for_each(const F& f) {
    if constexpr (Count > 1) for_each<Count - 1>(f);
    f(std::integral_constant<int, Count - 1>{});
}

// How many of the sums of one query fit into registers beside those of others.
template <class Lanes>
constexpr int kMostSealedRows = Lanes::width == 16 ? kBlockRows : 3;

// Vectors that `Runs` times width bytes hold, `Runs` for each of the codes of a byte; or half as many bytes, with two
// codes of each in a vector, where Runs is 0.
template <int Bits, int Runs>
constexpr int kVectorsOf = Runs ? Runs * 8 / Bits : 4 / Bits;

// The codes of a byte's vectors. Calls f(number of the vector, its codes).
template <class Lanes, int Bits, int Runs, class F>
[[gnu::always_inline]] inline void for_vectors(const std::byte* line, const F& f) {
    if constexpr (Runs == 0) {
        const auto codes = Lanes::bytes_twice(line);
        for_each<kVectorsOf<Bits, 0>>([&](auto v) {
            constexpr int kShift = 2 * Bits * decltype(v)::value;
            f(v, Lanes::template shifted<kShift, kShift + Bits>(codes));
        });
    } else {
        for_each<Runs>([&](auto run) {
            const auto codes = Lanes::bytes(line + decltype(run)::value * Lanes::width);
            for_each<8 / Bits>([&](auto phase) {
                constexpr int kPhase = decltype(phase)::value;
                f(std::integral_constant<int, kPhase * Runs + decltype(run)::value>{},
                  Lanes::template shifted<kPhase * Bits>(codes));
            });
        });
    }
}

// Scores of tokens whose codes lie from byte `at` of a channel's on.
template <class Lanes, int Bits, int Runs, int Rows>
void score_run(const Sealed& part, const std::byte* block, std::int64_t at, const float* x, float* scores,
               kvine::Stream& next, std::int64_t lines) {
    using Floats = typename Lanes::Floats;
    constexpr int kVectors = kVectorsOf<Bits, Runs>;
    constexpr std::int64_t kChannels = 64;  // whose scales and minima are widened at a time
    const std::int64_t side = part.block_size * Bits / 8, stride = padded<Lanes>(part.width);
    alignas(64) float scales[kChannels], leasts[kChannels];
    Floats sums[Rows][kVectors];
    for (auto& of_row : sums)
        for (auto& sum : of_row) sum = Lanes::zero();
    for (std::int64_t first = 0; first < part.width; first += kChannels) {
        const std::int64_t count = std::min(kChannels, part.width - first);
        const std::byte *stored = block + part.code_bytes() + 2 * first, *line = block + first * side + at;
        widen_halves<Lanes>(stored, count, scales);
        widen_halves<Lanes>(stored + 2 * part.width, count, leasts);
        for (std::int64_t d = 0; d < count; ++d, line += side) {
            next.fetch(lines);
            const Meaning<Lanes, Bits> meaning(scales[d], leasts[d]);
            Floats keys[kVectors], factors[Rows];
            for_vectors<Lanes, Bits, Runs>(line, [&](auto v, auto codes) { keys[v] = meaning.of(codes); });
            for (int r = 0; r < Rows; ++r) factors[r] = Lanes::fill(x[r * stride + first + d]);
            for (int r = 0; r < Rows; ++r)
                for (int v = 0; v < kVectors; ++v) sums[r][v] = Lanes::fma(factors[r], keys[v], sums[r][v]);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < kVectors; ++v) {
            const std::int64_t token = Runs ? v / Runs * side + v % Runs * Lanes::width : v * Lanes::width;
            Lanes::store(scores + r * kTileKeys + at + token, sums[r][v]);
        }
}

template <class Lanes, int Bits, int Runs>
void score_runs(const Sealed& part, const std::byte* block, const float* x, std::int64_t rows, float* scores,
                kvine::Stream next) {
    constexpr int kMost = kVectorsOf<Bits, Runs> > 2 ? kMostSealedRows<Lanes> : kBlockRows;
    const std::int64_t side = part.block_size * Bits / 8, lines = (next.lines() + part.width - 1) / part.width;
    for (std::int64_t row = 0; row < rows; row += kMost)
        with_rows<kMost>(std::min<std::int64_t>(rows - row, kMost), [&](auto count) {
            const float* from = x + row * padded<Lanes>(part.width);
            for (std::int64_t at = 0; at < side; at += Runs ? Runs * Lanes::width : side)
                score_run<Lanes, Bits, Runs, decltype(count)::value>(part, block, at, from, scores + row * kTileKeys,
                                                                     next, lines);
        });
}

// Calls f with how many vectors of bytes are read of a channel's codes at a time, at most as many as registers hold.
template <class Lanes, class F>
void with_runs(const Sealed& part, const F& f) {
    const std::int64_t side = part.block_size * part.bits / 8;
    const auto with = [&](auto bits, auto run) { f(bits, run); };
    using std::integral_constant;
    constexpr integral_constant<int, 0> kHalf{};
    constexpr integral_constant<int, 1> kOne{};
    constexpr integral_constant<int, 2> kTwo{};
    constexpr integral_constant<int, 4> kFour{};
    constexpr integral_constant<int, 8> kEight{};
    if (part.bits == 2) return side % Lanes::width ? with(kTwo, kHalf) : with(kTwo, kOne);
    if (part.bits == 4)
        return side % Lanes::width ? with(kFour, kHalf) : side % (2 * Lanes::width) ? with(kFour, kOne) : with(kFour, kTwo);
    if (side % (4 * Lanes::width) == 0) return with(kEight, kFour);
    side % (2 * Lanes::width) ? with(kEight, kOne) : with(kEight, kTwo);
}

// See Path::scores_sealed.
template <class Lanes>
bool scores_sealed(const Sealed& part) {
    const std::int64_t side = part.block_size * part.bits / 8;
    const bool places = part.block_size % kSideBySide == 0 && kTileKeys % part.block_size == 0;
    return part.bits && part.by_channel && places &&
           (side % Lanes::width == 0 || (part.bits < 8 && 2 * side == Lanes::width));
}

// See Path::score_sealed.
template <class Lanes>
void score_sealed(const Sealed& part, const std::byte* block, const float* x, std::int64_t rows, float* scores,
                  kvine::Stream next) {
    with_runs<Lanes>(part, [&](auto bits, auto runs) {
        score_runs<Lanes, decltype(bits)::value, decltype(runs)::value>(part, block, x, rows, scores, next);
    });
}

// Values are added four vectors at a time: of each group that a byte's codes belong to `kRunsOf` vectors, or of 8 bits of
// two groups, where there are so many.
constexpr std::int64_t kMostSealedGroups = 16;  // of a token

template <class Lanes, int Bits>
constexpr int kRunsOf = Bits == 2 ? 1 : Bits == 4 || Lanes::width == 16 ? 2 : 4;

// Adds values of channels whose codes lie from byte `at` of a token's on.
template <class Lanes, int Bits, int Parts, int Rows>
void add_run(const Sealed& part, const std::byte* codes, std::int64_t at, const float* scales, const float* leasts,
             const float* weights, int count, float* sums, kvine::Stream& next, std::int64_t lines) {
    using Floats = typename Lanes::Floats;
    constexpr int kRuns = kRunsOf<Lanes, Bits>, kVectors = Parts * kRuns;
    const std::int64_t side = part.width * Bits / 8, groups = part.width / part.group, stride = padded<Lanes>(part.width);
    std::int64_t channels[Parts], group_of[Parts];
    for (int p = 0; p < Parts; ++p) {
        channels[p] = at + p * (Bits == 8 ? kRuns * Lanes::width : side);
        group_of[p] = channels[p] / part.group;
    }
    Floats all[Rows][kVectors];
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < kVectors; ++v)
            all[r][v] = Lanes::load(sums + r * stride + channels[v / kRuns] + v % kRuns * Lanes::width);
    const std::byte* line = codes + at;
    for (int token = 0; token < count; ++token, line += side, scales += groups, leasts += groups) {
        next.fetch(lines);
        Floats factors[Rows];
        for (int r = 0; r < Rows; ++r) factors[r] = Lanes::fill(weights[r * kTileKeys + token]);
        const auto add = [&](auto part_of_line, auto run, auto bytes) {
            constexpr int p = decltype(part_of_line)::value, v = p * kRuns + decltype(run)::value;
            const Meaning<Lanes, Bits> meaning(scales[group_of[p]], leasts[group_of[p]]);
            const Floats value = meaning.of(Lanes::template shifted<Bits == 8 ? 0 : p * Bits>(bytes));
            for (int r = 0; r < Rows; ++r) all[r][v] = Lanes::fma(factors[r], value, all[r][v]);
        };
        for_each<kRuns>([&](auto run) {
            constexpr int kRun = decltype(run)::value;
            if constexpr (Bits == 8) {
                for_each<Parts>([&](auto p) {
                    add(p, run, Lanes::bytes(line + (decltype(p)::value * kRuns + kRun) * Lanes::width));
                });
            } else {
                const auto bytes = Lanes::bytes(line + kRun * Lanes::width);
                for_each<Parts>([&](auto p) { add(p, run, bytes); });
            }
        });
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < kVectors; ++v)
            Lanes::store(sums + r * stride + channels[v / kRuns] + v % kRuns * Lanes::width, all[r][v]);
}

template <class Lanes, int Bits, int Parts>
void add_runs(const Sealed& part, const std::byte* block, int first, int count, const float* weights, std::int64_t rows,
              float* sums, kvine::Stream next) {
    constexpr int kMost = kMostSealedRows<Lanes>, kStepOf = kRunsOf<Lanes, Bits> * Lanes::width * (Bits == 8 ? Parts : 1);
    const std::int64_t side = part.width * Bits / 8, groups = part.width / part.group;
    const std::int64_t lines = (next.lines() + count - 1) / count;
    alignas(64) float scales[kTileKeys * kMostSealedGroups], leasts[kTileKeys * kMostSealedGroups];
    const std::byte* stored = block + part.code_bytes() + 2 * first * groups;
    widen_halves<Lanes>(stored, count * groups, scales);
    widen_halves<Lanes>(stored + 2 * part.num_groups(), count * groups, leasts);
    for (std::int64_t row = 0; row < rows; row += kMost)
        with_rows<kMost>(std::min<std::int64_t>(rows - row, kMost), [&](auto of) {
            for (std::int64_t at = 0; at < side; at += kStepOf)
                add_run<Lanes, Bits, Parts, decltype(of)::value>(part, block + first * side, at, scales, leasts,
                                                                 weights + row * kTileKeys, count,
                                                                 sums + row * padded<Lanes>(part.width), next, lines);
        });
}

// See Path::adds_sealed.
template <class Lanes>
bool adds_sealed(const Sealed& part) {
    if (!part.bits || part.width / part.group > kMostSealedGroups) return false;
    const std::int64_t side = part.width * part.bits / 8;
    const std::int64_t run = Lanes::width * (part.bits == 8   ? kRunsOf<Lanes, 8>
                                             : part.bits == 4 ? kRunsOf<Lanes, 4>
                                                              : kRunsOf<Lanes, 2>);
    return part.group % run == 0 && side % run == 0;
}

// See Path::add_sealed.
template <class Lanes>
void add_sealed(const Sealed& part, const std::byte* block, int first, int count, const float* weights,
                std::int64_t rows, float* sums, kvine::Stream next) {
    const auto add = [&](auto bits, auto parts) {
        add_runs<Lanes, decltype(bits)::value, decltype(parts)::value>(part, block, first, count, weights, rows, sums,
                                                                       next);
    };
    using std::integral_constant;
    if (part.bits == 2) return add(integral_constant<int, 2>{}, integral_constant<int, 4>{});
    if (part.bits == 4) return add(integral_constant<int, 4>{}, integral_constant<int, 2>{});
    constexpr int kTwo = kRunsOf<Lanes, 8> == 2 ? 2 : 1;  // two groups, where one is two vectors
    if (part.width % (kTwo * kRunsOf<Lanes, 8> * Lanes::width) == 0)
        return add(integral_constant<int, 8>{}, integral_constant<int, kTwo>{});
    add(integral_constant<int, 8>{}, integral_constant<int, 1>{});
}

}  // namespace
