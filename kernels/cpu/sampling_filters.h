// Top-k, top-p and min-p of one row, as worker/filters.py defines them, to the bit.
//
// Each filter lets a prefix of the tokens pass, in the order of falling scores and, among equals, of rising ids; so all
// filters together are one bound on that order. Nothing is sorted but what lies about the bound.
#pragma once

#include <cmath>

#include "sampling_row.h"

namespace HEADRACE_ISA {
namespace sampling {

constexpr int FIRST_CUT = 128;            // so many of the best tokens are looked at before all are
constexpr float LEAST_WEIGHTY = -25.0f;   // a score that weighs nothing
constexpr int RUNGS = 4, DESCENTS = 4;   // thresholds that are tried at once, and how often

// exp(score), rounded to a multiple of 2**-34, in single operations and without fused ones: the very bits of
// worker/filters.py, whatever the hardware. Sums of up to 2**19 of them are exact in double, in any order.
inline vf vweight(vf score) {
    const vf clamped = vmax(score, vset(LEAST_WEIGHTY));
    const vf n = vround(vmul(clamped, vset(1.44269504088896341f)));
    vf r = vsub(clamped, vmul(n, vset(0.693359375f)));
    r = vadd(r, vmul(n, vset(2.12194440e-4f)));
    vf p = vset(1.9875691500e-4f);
    p = vadd(vmul(p, r), vset(1.3981999507e-3f));
    p = vadd(vmul(p, r), vset(8.3334519073e-3f));
    p = vadd(vmul(p, r), vset(4.1665795894e-2f));
    p = vadd(vmul(p, r), vset(1.6666665459e-1f));
    p = vadd(vmul(p, r), vset(5.0000001201e-1f));
    p = vadd(vmul(vmul(r, r), p), vadd(r, vset(1.0f)));
    const vf grid = vset(1.5f / 2048.0f);
    return vsub(vadd(vmul(p, vpow2(n)), grid), grid);
}

// The exact sum of weights: of each its multiple of 2**-17 and the rest apart, either exact in float for 128 of them.
class Sum {
   public:
    void add(vf weight) {
        const vf grid = vset(96.0f);
        const vf coarse = vsub(vadd(weight, grid), grid);
        coarse_ = vadd(coarse_, coarse);
        fine_ = vadd(fine_, vsub(weight, coarse));
        if (++pending_ == 128) flush();
    }

    double total() {
        flush();
        return total_;
    }

   private:
    void flush() {
        float coarse[W], fine[W];
        vstore(coarse, coarse_);
        vstore(fine, fine_);
        for (int i = 0; i < W; ++i) total_ += double(coarse[i]) + double(fine[i]);
        coarse_ = fine_ = vzero();
        pending_ = 0;
    }

    vf coarse_ = vzero(), fine_ = vzero();
    double total_ = 0;
    int pending_ = 0;
};

// Gathers the best tokens of a row, at least `count` of them if as many are possible, in no order.
template <class T>
inline Ranks& gather_best(const LogitRow<T>& row, int count, Scratch& scratch) {
    float least = IMPOSSIBLE;
    if (count <= row.blocks) {  // the count-th best of the blocks' best: so many tokens at least are no worse
        std::memcpy(scratch.order, scratch.maxima, sizeof(float) * row.blocks);
        std::nth_element(scratch.order, scratch.order + count - 1, scratch.order + row.blocks, Falling());
        least = scratch.order[count - 1];
    }
    least = std::max(least, std::numeric_limits<float>::lowest());
    scratch.ranks.count = 0;
    for (int block = 0; block < row.blocks; ++block) {
        if (scratch.maxima[block] < least) continue;
        float scores[BLOCK];
        row.block_scores(block, scores);
        for (int i = 0; i < BLOCK; ++i)
            if (scores[i] >= least) scratch.ranks.add(scores[i], block * BLOCK + i);
    }
    return scratch.ranks;
}

// The mass up to and with each of sorted tokens, where `before` is that of the tokens before them.
inline double* masses_through(const Ranks& sorted, double before, double* masses) {
    for (int first = 0; first < sorted.count; first += W) {
        float values[W];
        for (int i = 0; i < W; ++i)
            values[i] = first + i < sorted.count ? score_of(sorted.begin[first + i]) : LEAST_WEIGHTY;
        vstore(values, vweight(vload(values)));
        for (int i = 0; i < W; ++i) masses[first + i] = before += double(values[i]);
    }
    return masses;
}

// The first of sorted tokens through which the mass reaches the bound; LAST if none does.
inline Rank reaching(const Ranks& sorted, const double* masses, double bound) {
    for (int i = 0; i < sorted.count; ++i)
        if (masses[i] >= bound) return sorted.begin[i];
    return LAST;
}

// The tokens that weigh something, block by block.
class Weighty {
   public:
    template <class T>
    Weighty(const LogitRow<T>& row, Scratch& scratch)
        : scores(scratch.scores), weights(scratch.weights), blocks_(scratch.listed) {
        Sum sum;
        for (int block = 0; block < row.blocks; ++block) {
            if (scratch.maxima[block] <= LEAST_WEIGHTY) continue;
            row.block_scores(block, scores + width);
            for (int i = width; i < width + BLOCK; i += W) {
                const vf weight = vweight(vload(scores + i));
                vstore(weights + i, weight);
                sum.add(weight);
            }
            blocks_[width / BLOCK] = block;
            width += BLOCK;
        }
        total = sum.total();
    }

    int id(int index) const { return blocks_[index / BLOCK] * BLOCK + index % BLOCK; }

    // Narrows scores (low, high] to a part in which the bound on the mass above is crossed, as far as float sums tell.
    void narrow(double bound, float& low, float& high) const {
        float threshold[RUNGS];
        vf at[RUNGS], above[RUNGS];
        for (int i = 0; i < RUNGS; ++i) {
            threshold[i] = high + (low - high) * float(i + 1) / float(RUNGS + 1);
            at[i] = vset(threshold[i]);
            above[i] = vzero();
        }
        for (int first = 0; first < width; first += W) {
            const vf score = vload(scores + first), weight = vload(weights + first);
            for (int i = 0; i < RUNGS; ++i) above[i] = add_above(above[i], score, at[i], weight);
        }
        for (int i = 0; i < RUNGS; ++i) {
            if (double(vsum(above[i])) >= bound) {
                low = threshold[i];
                return;
            }
            high = threshold[i];
        }
    }

    // Gathers what has a score in (low, high]; returns the mass above.
    double gather(float low, float high, Ranks& ranks) const {
        Sum sum;
        ranks.count = 0;
        for (int first = 0; first < width; first += W) {
            const vf score = vload(scores + first);
            sum.add(vabove(score, vset(high), vload(weights + first)));
            for (uint32_t lanes = lanes_within(score, vset(low), vset(high)); lanes; lanes &= lanes - 1) {
                const int index = first + __builtin_ctz(lanes);
                ranks.add(scores[index], id(index));
            }
        }
        return sum.total();
    }

    float* const scores;   // [width]
    float* const weights;  // [width]
    int width = 0;
    double total;

   private:
    int* const blocks_;
};

// The last token that passes top-p alone: the first through which the mass reaches top_p of all mass.
template <class T>
inline Rank top_p_edge(const LogitRow<T>& row, double top_p, Scratch& scratch) {
    const Weighty weighty(row, scratch);
    const double bound = top_p * weighty.total;
    Ranks& ranks = scratch.ranks;
    const int count = std::min(FIRST_CUT, row.blocks);
    gather_best(row, count, scratch).cut(count, true);
    Rank edge = reaching(ranks, masses_through(ranks, 0.0, scratch.masses), bound);
    if (edge != LAST) return edge;
    float low = LEAST_WEIGHTY, high = 0.0f;
    for (int i = 0; i < DESCENTS; ++i) weighty.narrow(bound, low, high);
    const double before = weighty.gather(low, high, ranks);
    if (before < bound) {
        ranks.cut(ranks.count, true);
        edge = reaching(ranks, masses_through(ranks, before, scratch.masses), bound);
        if (edge != LAST) return edge;
    }
    weighty.gather(LEAST_WEIGHTY, 0.0f, ranks);  // the sums in float were too coarse
    ranks.cut(ranks.count, true);
    return reaching(ranks, masses_through(ranks, 0.0, scratch.masses), bound);
}

// The last token that passes all filters.
template <class T>
inline Rank filter_edge(const LogitRow<T>& row, int64_t top_k, double top_p, double min_p, Scratch& scratch) {
    Rank edge = LAST;
    if (top_k > 0 && top_k < row.vocabulary) {
        Ranks& ranks = gather_best(row, int(top_k), scratch);
        ranks.cut(int(top_k), top_p < 1);
        edge = ranks.worst();
        if (top_p < 1) {  // of the mass that top-k leaves
            const double* masses = masses_through(ranks, 0.0, scratch.masses);
            edge = std::min(edge, reaching(ranks, masses, top_p * masses[ranks.count - 1]));
        }
    } else if (top_p < 1) {
        edge = top_p_edge(row, top_p, scratch);
    }
    if (min_p > 0) edge = std::min(edge, rank_of(float(std::min(std::log(min_p), 0.0)), ~uint32_t(0)));
    return edge;
}

}  // namespace sampling
}  // namespace HEADRACE_ISA
