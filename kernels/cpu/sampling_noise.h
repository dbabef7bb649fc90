// Counter-based Gumbel noise, as worker/noise.py defines it, and bounds on it that cost no logarithm.
#pragma once

#include <cmath>

#include "sampling_row.h"

namespace HEADRACE_ISA {
namespace sampling {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u, TOKENS = 0x5851F42D4C957F2Du;

inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

inline uint64_t output_of(uint64_t state, uint64_t number) { return mix(state + number * GOLDEN); }

inline double uniform(uint64_t output) { return (double(output >> 32) + 0.5) * 0x1p-32; }

inline double largest_noise(uint64_t output) { return -std::log(-std::log(uniform(output))) + std::log(double(BLOCK)); }

// Bounds on the largest noise of a block, without its two logarithms: it rises with the output's upper half, and the
// complement of that is looked up by its magnitude and four bits more.
struct NoiseBounds {
    double bound[33][16];

    NoiseBounds() {
        for (int power = 0; power < 33; ++power)
            for (int part = 0; part < 16; ++part) {
                const double least = std::ldexp(1.0 + part / 16.0, power - 33);  // of 1 - u
                bound[power][part] = -std::log(-std::log1p(-least)) + std::log(double(BLOCK)) + 1e-9;
            }
    }

    double operator()(uint64_t output) const {
        const uint64_t rest = uint64_t(~uint32_t(output >> 32)) << 5 | 16;  // (1 - u) * 2**37
        const int power = 63 - __builtin_clzll(rest);
        return bound[power - 4][(rest >> (power - 4)) & 15];
    }
};

}  // namespace sampling
}  // namespace HEADRACE_ISA
