// Plain C++, for every other CPU: loops of a fixed length that compilers turn into what vectors there are.
#include "make_path.hpp"

namespace {

struct Portable {
    static constexpr int width = 8;
    struct Floats {
        float at[width];
    };
    struct Ints {
        std::uint8_t at[width];
    };

    static Floats zero() { return {}; }

    static Floats load(const float* from) {
        Floats v;
        std::memcpy(v.at, from, sizeof v.at);
        return v;
    }

    static Floats fill(float x) {
        Floats v;
        for (float& at : v.at) at = x;
        return v;
    }

    static void store(float* to, const Floats& v) { std::memcpy(to, v.at, sizeof v.at); }

    static Floats fma(const Floats& a, const Floats& b, Floats c) {
        for (int i = 0; i < width; ++i) c.at[i] += a.at[i] * b.at[i];
        return c;
    }

    static Floats add(Floats a, const Floats& b) {
        for (int i = 0; i < width; ++i) a.at[i] += b.at[i];
        return a;
    }

    static Floats sub(Floats a, const Floats& b) {
        for (int i = 0; i < width; ++i) a.at[i] -= b.at[i];
        return a;
    }

    static Floats max(Floats a, const Floats& b) {
        for (int i = 0; i < width; ++i) a.at[i] = a.at[i] > b.at[i] ? a.at[i] : b.at[i];
        return a;
    }

    static Floats scaled(Floats v, const Floats& shifted) {
        for (int i = 0; i < width; ++i) v.at[i] = from_bits(to_bits(v.at[i]) + (to_bits(shifted.at[i]) << 23));
        return v;
    }

    static Floats from(const Floats& least, const Floats& x, Floats v) {
        for (int i = 0; i < width; ++i) v.at[i] = from_bits(to_bits(v.at[i]) & (x.at[i] < least.at[i] ? 0u : ~0u));
        return v;
    }

    static float greatest(Floats v) {
        for (int half = width / 2; half; half /= 2)
            for (int i = 0; i < half; ++i) v.at[i] = v.at[i] > v.at[half + i] ? v.at[i] : v.at[half + i];
        return v.at[0];
    }

    static float sum(const Floats& v) {
        return ((v.at[0] + v.at[4]) + (v.at[2] + v.at[6])) + ((v.at[1] + v.at[5]) + (v.at[3] + v.at[7]));
    }

    static void sums(const Floats& a, const Floats& b, const Floats& c, const Floats& d, float* to) {
        to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
    }

    template <class Format>
    static constexpr int place(int i) {
        return i;
    }

    template <class Format>
    static Pair<Portable> widen(const std::byte* stored) {
        typename Format::Stored aligned[2 * width];
        std::memcpy(aligned, stored, sizeof aligned);
        Pair<Portable> pair;
        for (int i = 0; i < width; ++i) pair.first.at[i] = Format::widen(aligned[i]);
        for (int i = 0; i < width; ++i) pair.second.at[i] = Format::widen(aligned[width + i]);
        return pair;
    }

    template <class Format>
    static void turn(const std::byte* const* rows, std::int64_t at, float* to) {
        for (int d = 0; d < kTurnedDims; ++d)
            for (int k = 0; k < kTurnedKeys; ++k)
                to[d * 4 * width + k] = load_scalar<Format>(rows[k] + at + d * Format::size);
    }

    static constexpr bool kTables = false;

    static Floats mul(Floats a, const Floats& b) {
        for (int i = 0; i < width; ++i) a.at[i] *= b.at[i];
        return a;
    }

    static Ints bytes(const std::byte* from) {
        Ints ints;
        std::memcpy(ints.at, from, sizeof ints.at);
        return ints;
    }

    static Ints bytes_twice(const std::byte* from) {
        Ints ints;
        for (int half : {0, width / 2}) std::memcpy(ints.at + half, from, width / 2);
        return ints;
    }

    template <int First, int Second = First>
    static Ints shifted(Ints ints) {
        for (int i = 0; i < width; ++i)
            ints.at[i] = static_cast<std::uint8_t>(ints.at[i] >> (i < width / 2 ? First : Second));
        return ints;
    }

    template <int Bits>
    static Floats floats(const Ints& ints) {
        Floats v;
        for (int i = 0; i < width; ++i) v.at[i] = static_cast<float>(ints.at[i] & ((1 << Bits) - 1));
        return v;
    }
};

struct PackedPortable {
    static constexpr int width = 8;
    using Floats = Portable::Floats;
    struct Ints {
        std::int32_t at[width];
    };
    struct Weights {
        std::int8_t of_inputs[8][4 * width];  // 4 inputs of each of the 8 outputs
    };

    static Floats fill(float x) { return Portable::fill(x); }
    static Floats load(const float* from) { return Portable::load(from); }
    static void store(float* to, const Floats& v) { Portable::store(to, v); }
    static Floats fma(const Floats& a, const Floats& b, const Floats& c) { return Portable::fma(a, b, c); }

    static Floats mul(Floats a, const Floats& b) {
        for (int i = 0; i < width; ++i) a.at[i] *= b.at[i];
        return a;
    }

    static Floats to_floats(const Ints& ints) {
        Floats v;
        for (int i = 0; i < width; ++i) v.at[i] = static_cast<float>(ints.at[i]);
        return v;
    }

    static Floats halves(const std::byte* from) {
        Floats v;
        for (int i = 0; i < width; ++i) v.at[i] = load_scalar<Fp16>(from + i * Fp16::size);
        return v;
    }

    static Floats bytes(const std::byte* from) {
        Floats v;
        for (int i = 0; i < width; ++i) v.at[i] = static_cast<float>(std::to_integer<std::int8_t>(from[i]));
        return v;
    }

    template <Packing packing>
    static Weights unpack(const std::byte* group, int vector) {
        constexpr int bits = kvine::bits_of(packing);
        Weights weights;
        std::uint8_t chunk[4 * width];
        const auto read = [&](int c) { std::memcpy(chunk, group + c * 64 + vector * sizeof chunk, sizeof chunk); };
        for (int c = 0; c < (bits == 8 ? 8 : 4); ++c) {
            read(c);
            for (int i = 0; i < 4 * width; ++i)
                if constexpr (bits == 8) {
                    weights.of_inputs[c][i] = static_cast<std::int8_t>(chunk[i]);
                } else {
                    weights.of_inputs[2 * c][i] = static_cast<std::int8_t>(chunk[i] & 15);
                    weights.of_inputs[2 * c + 1][i] = static_cast<std::int8_t>(chunk[i] >> 4);
                }
        }
        if constexpr (bits == 5 || bits == 6) {
            constexpr int upper = bits - 4, count = 8 / upper, offset = bits == 6 ? 32 : 0;
            for (int c = 0; c < 8; ++c) {
                if (c % count == 0) read(4 + c / count);
                auto& w = weights.of_inputs[c];
                for (int i = 0; i < 4 * width; ++i)
                    w[i] = static_cast<std::int8_t>(
                        (w[i] | (chunk[i] >> (c % count * upper) & ((1 << upper) - 1)) << 4) - offset);
            }
        }
        return weights;
    }

    template <Packing packing>
    static Ints dot(const Weights& weights, const std::int8_t* q, int part, const std::int32_t*) {
        constexpr int chunks = 8 / kParts<packing>;
        Ints sum{};
        for (int c = part * chunks; c < (part + 1) * chunks; ++c)
            for (int o = 0; o < width; ++o)
                for (int i = 0; i < 4; ++i) sum.at[o] += weights.of_inputs[c][4 * o + i] * q[4 * c + i];
        return sum;
    }
};

}  // namespace

const kvine::Path kvine::portable = make_path<Portable, PackedPortable>("portable");
