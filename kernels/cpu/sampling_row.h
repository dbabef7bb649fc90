// A row of logits as the sampler sees it: scores, the order of its tokens, and the memory to work in.
//
// Scores are (logit - best) / temperature in float, and never above 0.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "vec.h"

namespace HEADRACE_ISA {
namespace sampling {

constexpr int BLOCK = 64;  // tokens whose noise is drawn together (worker/noise.py)
constexpr float IMPOSSIBLE = -std::numeric_limits<float>::infinity();

template <class T>
inline float largest_finite() {
    return to_float(T{0x7f7f});
}

template <>
inline float largest_finite<float>() {
    return std::numeric_limits<float>::max();
}

using Rank = uint64_t;  // less is better: falling score, then rising id
constexpr Rank LAST = ~Rank(0);

struct Better {
    bool operator()(Rank a, Rank b) const { return a < b; }
};

struct Falling {
    bool operator()(float a, float b) const { return a > b; }
};

inline Rank rank_of(float score, uint32_t id) {
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    return Rank(bits & 0x7fffffff) << 32 | id;  // of numbers that are not positive, without the sign
}

inline float score_of(Rank rank) {
    uint32_t bits = uint32_t(rank >> 32) | 0x80000000;
    float score;
    std::memcpy(&score, &bits, 4);
    return score;
}

// A lane for each x with low < x <= high.
inline uint32_t lanes_within(vf x, vf low, vf high) {
#if defined(__AVX512F__)
    return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, low, _CMP_GT_OQ), x, high, _CMP_LE_OQ);
#elif defined(__AVX2__) && defined(__FMA__)
    return uint32_t(_mm256_movemask_ps(
        _mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_GT_OQ), _mm256_cmp_ps(x, high, _CMP_LE_OQ))));
#else
    uint32_t lanes = 0;
    for (int i = 0; i < W; ++i) lanes |= uint32_t(x[i] > low[i] && x[i] <= high[i]) << i;
    return lanes;
#endif
}

inline float highest(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x);
#elif defined(__AVX2__) && defined(__FMA__)
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_shuffle_ps(most, most, 1)));
#else
    return vlargest(x);
#endif
}

// sum + value in the lanes where x > edge
inline vf add_above(vf sum, vf x, vf edge, vf value) {
#if defined(__AVX512F__)
    return _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(x, edge, _CMP_GT_OQ), sum, value);
#else
    return vadd(sum, vabove(x, edge, value));
#endif
}

// Memory that grows. Not std::vector: whatever this file takes from templates over plain types may be shared by the
// linker between instruction sets, and then runs on a machine that it was not compiled for.
template <class E>
class Room {
   public:
    Room() = default;
    ~Room() { std::free(start_); }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

    E* at_least(size_t size) {
        if (size > size_) {
            void* more = std::realloc(start_, size * sizeof(E));
            if (!more) throw std::bad_alloc();
            start_ = static_cast<E*>(more);
            size_ = size;
        }
        return start_;
    }

   private:
    E* start_ = nullptr;
    size_t size_ = 0;
};

struct Ranks {  // gathered tokens, at most as many as there are
    Rank* begin;
    int count;

    void add(float score, int id) { begin[count++] = rank_of(score, uint32_t(id)); }

    // Leaves the best `most`; sorts them if asked.
    void cut(int most, bool sorted) {
        if (count > most) {
            std::nth_element(begin, begin + most - 1, begin + count, Better());
            count = most;
        }
        if (sorted) std::sort(begin, begin + count, Better());
    }

    Rank worst() const {
        Rank worst = begin[0];
        for (int i = 1; i < count; ++i) worst = std::max(worst, begin[i]);
        return worst;
    }
};

// What one thread works with, kept from row to row so that no step allocates.
class Scratch {
   public:
    void fit(int blocks) {
        const size_t width = size_t(blocks) * BLOCK;
        maxima = maxima_.at_least(blocks);
        order = order_.at_least(blocks);
        listed = listed_.at_least(blocks);
        bounds = bounds_.at_least(blocks);
        scores = scores_.at_least(width);
        weights = weights_.at_least(width);
        masses = masses_.at_least(width + W);
        ranks.begin = ranks_.at_least(width);
        ranks.count = 0;
    }

    float* maxima;   // [blocks], scores
    float* order;    // [blocks]
    int* listed;     // [blocks]
    double* bounds;  // [blocks]
    float* scores;   // [blocks * BLOCK]
    float* weights;  // [blocks * BLOCK]
    double* masses;  // [blocks * BLOCK + W]
    Ranks ranks;

   private:
    Room<float> maxima_, order_, scores_, weights_;
    Room<double> bounds_, masses_;
    Room<int> listed_;
    Room<Rank> ranks_;
};

template <class T>
struct LogitRow {
    const T* logits;
    int vocabulary;
    int blocks;
    float best = IMPOSSIBLE;
    float temperature = 1.0f;

    LogitRow(const T* logits, int vocabulary)
        : logits(logits), vocabulary(vocabulary), blocks((vocabulary + BLOCK - 1) / BLOCK) {}

    // NaN counts as impossible, +inf as the largest finite number. (Of vmax and vmin the second argument answers for a
    // NaN in the first.)
    static vf clean(vf x) { return vmin(vmax(x, vset(IMPOSSIBLE)), vset(largest_finite<T>())); }

    static float clean(float x) { return x == x ? std::min(x, largest_finite<T>()) : IMPOSSIBLE; }

    // The best of all logits, and of each block.
    void find_best(float* maxima) {
        for (int block = 0; block < blocks; ++block) {
            const int first = block * BLOCK;
            float most = IMPOSSIBLE;
            if (first + BLOCK <= vocabulary) {
                vf largest = vset(IMPOSSIBLE);
                for (int i = 0; i < BLOCK; i += W) largest = vmax(vload(logits + first + i), largest);
                most = std::min(highest(largest), largest_finite<T>());
            } else {
                for (int id = first; id < vocabulary; ++id) most = std::max(most, clean(to_float(logits[id])));
            }
            maxima[block] = most;
            best = std::max(best, most);
        }
    }

    int first_best(const float* maxima) const {
        int block = 0;
        while (maxima[block] != best) ++block;
        int id = block * BLOCK;
        while (clean(to_float(logits[id])) != best) ++id;
        return id;
    }

    // Monotone in the logit, so that the score of a block's best is the best of its scores.
    float score(float logit) const { return (logit - best) / temperature; }

    void block_scores(int block, float* scores) const {
        const int first = block * BLOCK;
        if (first + BLOCK <= vocabulary) {
            for (int i = 0; i < BLOCK; i += W)
                vstore(scores + i, vdiv(vsub(clean(vload(logits + first + i)), vset(best)), vset(temperature)));
        } else {
            for (int i = 0; i < BLOCK; ++i)
                scores[i] = first + i < vocabulary ? score(clean(to_float(logits[first + i]))) : IMPOSSIBLE;
        }
    }
};

}  // namespace sampling
}  // namespace HEADRACE_ISA
