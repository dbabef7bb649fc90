// int8 weights of a product: the order in which a packed panel holds them, and how they become, in registers, the
// operands that Unit<T>::mac takes. Whole numbers up to 127 are exact in bf16 and float.
//
// A panel holds for each unit of k (one k for float, two for bf16) the unit of every column: 32 or 64 bytes. Of bf16,
// blocks of 4 columns lie in the order 0, 4, 1, 5, 2, 6, 3, 7, so that interleaving bytes within lanes of 16, which is
// all that x86 does cheaply, gives columns 0 to 15 from the lower halves of lanes and 16 to 31 from the upper ones.
#pragma once

#include "vec.h"

namespace HEADRACE_ISA {

#if defined(__AVX512F__)
inline vf vfrom_int8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
#elif defined(__AVX2__)
inline vf vfrom_int8(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
#else
inline vf vfrom_int8(const int8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    const vi tops = {int32_t(four << 24), int32_t(four << 16), int32_t(four << 8), int32_t(four)};
    return __builtin_convertvector(tops >> 24, vf);
}
#endif

constexpr int PANEL = 32;  // columns

// load: columns [first, first + COLS * W) of a unit. `first` is a multiple of COLS * W, and known when this is compiled.
// AHEAD: there are registers enough to convert a unit while the one before is multiplied.
// store: W columns of a unit where an expanded panel has them (in floats where the processor has no products of bf16).
template <class T>
struct Int8;

template <>
struct Int8<float> {
    using Column = vf;
    static constexpr bool AHEAD = W == 16;
    static constexpr int place(int column, int) { return column; }

    template <int COLS>
    static inline __attribute__((always_inline)) void load(const int8_t* unit, int first, Column (&out)[COLS]) {
        for (int j = 0; j < COLS; ++j) out[j] = vfrom_int8(unit + first + j * W);
    }
    static inline void store(char* panel, int unit, int column, Column x) { vstore((float*)panel + size_t(unit) * PANEL + column, x); }
    static inline vf mac(vf acc, vf a, Column b) { return vfma(a, b, acc); }
};

// Where in its 64 bytes a unit of bf16 has value `v` of a column.
constexpr int int8_place(int column, int v) {
    const int block = column / 4;
    return 8 * (2 * (block % 4) + block / 4) + 2 * (column % 4) + v;
}

#if defined(__AVX512BF16__)

// The two bytes of the bf16 of 0 to 127.
struct Int8Bytes {
    alignas(64) uint8_t low[128], high[128];
    constexpr Int8Bytes() : low(), high() {
        for (int x = 1; x < 128; ++x) {
            int exponent = 0;
            while (x >> (exponent + 1)) ++exponent;
            const int bits = (127 + exponent) << 7 | ((x << (7 - exponent)) & 127);
            low[x] = uint8_t(bits);
            high[x] = uint8_t(bits >> 8);
        }
    }
};
constexpr Int8Bytes INT8_BYTES;

template <>
struct Int8<bf16> {
    using Column = __m512bh;
    static constexpr bool AHEAD = true;
    static constexpr int place(int column, int v) { return int8_place(column, v); }

    template <int COLS>
    static inline __attribute__((always_inline)) void load(const int8_t* unit, int, Column (&out)[COLS]) {
        static_assert(COLS == 2);
        const vi *lows = (const vi*)INT8_BYTES.low, *highs = (const vi*)INT8_BYTES.high;
        const vi x = _mm512_loadu_si512(unit), size = _mm512_abs_epi8(x);
        const vi low = _mm512_permutex2var_epi8(lows[0], size, lows[1]);
        const vi high = _mm512_permutex2var_epi8(highs[0], size, highs[1]);
        const vi top = _mm512_ternarylogic_epi32(high, x, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (x & sign)
        out[0] = (__m512bh)_mm512_unpacklo_epi8(low, top);
        out[1] = (__m512bh)_mm512_unpackhi_epi8(low, top);
    }
    static inline void store(char* panel, int unit, int column, Column x) {
        _mm512_storeu_si512(panel + 4 * (size_t(unit) * PANEL + column), (vi)x);
    }
    static inline vf mac(vf acc, __m512bh a, Column b) { return _mm512_dpbf16_ps(acc, a, b); }
};

#else

template <>
struct Int8<bf16> {
    struct Column {
        vf low, high;
    };
    static constexpr bool AHEAD = false;
    static constexpr int place(int column, int v) { return int8_place(column, v); }

#if defined(__AVX512F__)
    template <int COLS>
    static inline __attribute__((always_inline)) void load(const int8_t* unit, int, Column (&out)[COLS]) {
        static_assert(COLS == 2);
        const vi x = _mm512_loadu_si512(unit);
        const vi pairs[] = {_mm512_unpacklo_epi8(_mm512_setzero_si512(), x), _mm512_unpackhi_epi8(_mm512_setzero_si512(), x)};
        for (int j = 0; j < COLS; ++j) {
            out[j].low = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs[j], 16), 24));
            out[j].high = _mm512_cvtepi32_ps(_mm512_srai_epi32(pairs[j], 24));
        }
    }
#elif defined(__AVX2__)
    template <int COLS>
    static inline __attribute__((always_inline)) void load(const int8_t* unit, int first, Column (&out)[COLS]) {
        static_assert(COLS == 2);
        for (int j = 0; j < COLS; ++j) {
            const vi x = _mm256_loadu_si256((const vi*)(unit + 32 * j)), zero = _mm256_setzero_si256();
            const vi pairs = first ? _mm256_unpackhi_epi8(zero, x) : _mm256_unpacklo_epi8(zero, x);
            out[j].low = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 24));
            out[j].high = _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 24));
        }
    }
#else
    template <int COLS>
    static inline void load(const int8_t* unit, int first, Column (&out)[COLS]) {
        for (int j = 0; j < COLS; ++j) {
            int32_t two[2];  // four columns, two bytes each
            std::memcpy(two, unit + int8_place(first + j * W, 0), 8);
            const vi pairs = {int32_t(uint32_t(two[0]) << 16), two[0], int32_t(uint32_t(two[1]) << 16), two[1]};
            out[j].low = __builtin_convertvector((pairs << 8) >> 24, vf);
            out[j].high = __builtin_convertvector(pairs >> 24, vf);
        }
    }
#endif

    static inline void store(char* panel, int unit, int column, Column x) {
        float* low = (float*)panel + 2 * size_t(unit) * PANEL + column;
        vstore(low, x.low);
        vstore(low + PANEL, x.high);
    }
    template <class Broadcast>
    static inline vf mac(vf acc, Broadcast a, Column b) {
        return vfma(a.high, b.high, vfma(a.low, b.low, acc));
    }
};

#endif

}  // namespace HEADRACE_ISA
