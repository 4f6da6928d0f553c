// Plain C++, for every other CPU: loops of a fixed length that compilers turn into what vectors there are.
#include "make_path.hpp"

namespace {

struct Portable {
    static constexpr int width = 8;
    struct Floats {
        float at[width];
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

    static float sum(const Floats& v) {
        return ((v.at[0] + v.at[4]) + (v.at[2] + v.at[6])) + ((v.at[1] + v.at[5]) + (v.at[3] + v.at[7]));
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
};

}  // namespace

const kvine::Path kvine::portable = make_path<Portable>("portable");
