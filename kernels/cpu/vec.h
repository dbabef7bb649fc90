// Vectors of W floats, for the instruction set that this file is compiled for (see build flags in setup.py).
//
// Every operation is spelled out: fused multiply-adds where the hardware has them, never where it has not, and compiled
// with -ffp-contract=off. A result then depends on the instruction set alone, not on what the compiler makes of a loop.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef HEADRACE_ISA
#error "HEADRACE_ISA names the namespace of this build"
#endif

namespace HEADRACE_ISA {

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <class T>
inline T from_float(float x);

template <>
inline float from_float<float>(float x) {
    return x;
}

template <>
inline bf16 from_float<bf16>(float x) {  // to the nearest, ties to even; a NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16{0x7fc0};
    return bf16{uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#if defined(__AVX512F__)

constexpr int W = 16;
using vf = __m512;
using vi = __m512i;

inline vf vzero() { return _mm512_setzero_ps(); }
inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vabove(vf x, vf edge, vf value) {  // value where x > edge, else 0
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, edge, _CMP_GT_OQ), value);
}
inline vf vpow2(vf n) {  // 2 ** n for whole n in [-126, 127]
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline vf vload(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline vf vlow(vi pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline vf vhigh(vi pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)))); }
inline vi vload_bits(const void* p) { return _mm512_loadu_si512(p); }

#if defined(__AVX512BF16__)
inline void vstore(bf16* p, vf x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
#else
inline void vstore(bf16* p, vf x) {
    vi bits = _mm512_castps_si512(x);
    vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    vi rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0))));
}
#endif

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;

inline vf vzero() { return _mm256_setzero_ps(); }
inline vf vset(float x) { return _mm256_set1_ps(x); }
inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
inline void vstore(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vabove(vf x, vf edge, vf value) { return _mm256_and_ps(_mm256_cmp_ps(x, edge, _CMP_GT_OQ), value); }
inline vf vpow2(vf n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline vf vload(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline vf vlow(vi pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline vf vhigh(vi pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000)))); }
inline vi vload_bits(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void vstore(bf16* p, vf x) {
    vi bits = _mm256_castps_si256(x);
    vi odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    vi rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    vi nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storeu_si128((__m128i*)p, packed);
}

#else  // whatever the compiler's target offers for four floats

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

inline vf vset(float x) { return vf{x, x, x, x}; }
inline vf vzero() { return vset(0.0f); }
inline vf vload(const float* p) {
    vf x;
    std::memcpy(&x, p, 16);
    return x;
}
inline void vstore(float* p, vf x) { std::memcpy(p, &x, 16); }
inline vf vadd(vf a, vf b) { return a + b; }
inline vf vsub(vf a, vf b) { return a - b; }
inline vf vmul(vf a, vf b) { return a * b; }
inline vf vdiv(vf a, vf b) { return a / b; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vfma(vf a, vf b, vf c) { return a * b + c; }  // two roundings (-ffp-contract=off)
inline vf vround(vf a) {
    for (int i = 0; i < W; ++i) a[i] = std::nearbyintf(a[i]);
    return a;
}
inline vf vabove(vf x, vf edge, vf value) { return x > edge ? value : vzero(); }
inline vf vpow2(vf n) { return (vf)((__builtin_convertvector(n, vi) + 127) << 23); }
inline vf vload(const bf16* p) { return vf{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
inline vf vlow(vi pairs) { return (vf)(pairs << 16); }
inline vf vhigh(vi pairs) { return (vf)(pairs & int32_t(0xffff0000)); }
inline vi vload_bits(const void* p) {
    vi x;
    std::memcpy(&x, p, 16);
    return x;
}
inline void vstore(bf16* p, vf x) {
    for (int i = 0; i < W; ++i) p[i] = from_float<bf16>(x[i]);
}

#endif

// x rounded to T and back: what storing it would make of it.
template <class T>
inline vf vrounded(vf x);

template <>
inline vf vrounded<float>(vf x) {
    return x;
}

template <>
inline vf vrounded<bf16>(vf x) {
    bf16 stored[W];
    vstore(stored, x);
    return vload(stored);
}

// Halves onto halves: one order for everybody.
#if defined(__AVX512F__) || defined(__AVX2__)
inline float vsum4(__m128 x) {
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float vlargest4(__m128 x) {
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline float vsum8(__m256 x) { return vsum4(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1))); }
inline float vlargest8(__m256 x) { return vlargest4(_mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1))); }
#endif
#if defined(__AVX512F__)
inline float vsum(vf x) { return vsum8(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1))); }
inline float vlargest(vf x) { return vlargest8(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1))); }
#elif defined(__AVX2__)
inline float vsum(vf x) { return vsum8(x); }
inline float vlargest(vf x) { return vlargest8(x); }
#else
inline float vsum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float vlargest(vf x) { return std::fmax(std::fmax(x[0], x[2]), std::fmax(x[1], x[3])); }
#endif

inline float vfirst(vf x) {
#if defined(__AVX512F__)
    return _mm512_cvtss_f32(x);
#elif defined(__AVX2__)
    return _mm256_cvtss_f32(x);
#else
    return x[0];
#endif
}

// exp(x), exactly 0 for -inf and whatever underflows, within 2 ulp. Cephes' polynomial (Moshier).
#if defined(__AVX512F__)
inline vf vexp(vf x) {
    const vf bounded = vmax(x, vset(-110.0f));
    const vf n = vround(vmul(bounded, vset(1.44269504088896341f)));
    const vf r = vfma(n, vset(-1.42860677e-6f), vfma(n, vset(-0.693145752f), bounded));  // ln 2 in two parts
    vf p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(vmul(r, r), p, vadd(r, vset(1.0f)));
    return _mm512_scalef_ps(p, n);
}
#else
inline vf vexp(vf x) {  // 0 below -87, and as at 88 above it
    vf clamped = vmin(vmax(x, vset(-87.3f)), vset(88.0f));
    vf n = vround(vmul(clamped, vset(1.44269504088896341f)));
    vf r = vfma(n, vset(-0.693359375f), clamped);
    r = vfma(n, vset(2.12194440e-4f), r);
    vf p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(vmul(r, r), p, vadd(r, vset(1.0f)));
    return vabove(x, vset(-87.3f), vmul(p, vpow2(n)));
}
#endif

// x / (1 + exp(-x))
inline vf vsilu(vf x) {
    return vdiv(x, vadd(vset(1.0f), vexp(vsub(vzero(), x))));
}

// What a matrix product multiplies at once: four bytes of a row of A (two bf16 or one float) with four of each column.
template <class T>
struct Unit;

template <>
struct Unit<float> {
    static constexpr int values = 1, row_bytes = 4;  // of A
    using Broadcast = vf;
    static inline Broadcast broadcast(const char* p) {
        float x;
        std::memcpy(&x, p, 4);
        return vset(x);
    }
    static inline vf mac(vf acc, Broadcast a, const char* b) { return vfma(a, vload((const float*)b), acc); }
};

#if defined(__AVX512BF16__)
template <>
struct Unit<bf16> {
    static constexpr int values = 2, row_bytes = 4;
    using Broadcast = __m512bh;
    static inline Broadcast broadcast(const char* p) {
        int32_t pair;
        std::memcpy(&pair, p, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static inline vf mac(vf acc, Broadcast a, const char* b) {
        return _mm512_dpbf16_ps(acc, a, (__m512bh)_mm512_loadu_si512(b));
    }
};
#else
template <>
struct Unit<bf16> {
    static constexpr int values = 2, row_bytes = 4;
    struct Broadcast {
        vf low, high;
    };
    static inline Broadcast broadcast(const char* p) {
        bf16 pair[2];
        std::memcpy(pair, p, 4);
        return {vset(to_float(pair[0])), vset(to_float(pair[1]))};
    }
    static inline vf mac(vf acc, Broadcast a, const char* b) {
        vi pairs = vload_bits(b);
        return vfma(a.high, vhigh(pairs), vfma(a.low, vlow(pairs), acc));
    }
};
#endif

// bf16 whose rows of A are floats already: to broadcast a number from memory is one instruction, to widen it first four.
struct wide_rows {};

template <>
struct Unit<wide_rows> {
    static constexpr int values = 2, row_bytes = 8;
    struct Broadcast {
        vf low, high;
    };
    static inline Broadcast broadcast(const char* p) {
        float pair[2];
        std::memcpy(pair, p, 8);
        return {vset(pair[0]), vset(pair[1])};
    }
    static inline vf mac(vf acc, Broadcast a, const char* b) {
        vi pairs = vload_bits(b);
        return vfma(a.high, vhigh(pairs), vfma(a.low, vlow(pairs), acc));
    }
};

}  // namespace HEADRACE_ISA
