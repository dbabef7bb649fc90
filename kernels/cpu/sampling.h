// Choosing tokens from logits: what worker/sampling.py says, token for token, without a pass that can be spared.
//
// A row is one task of one thread, in one order, so its token depends on nothing beside it. The filters are exact on
// every instruction set. The noise is computed in double with the C library's log and exp, torch's with its own: they
// may differ in the last bit, and so may the winner where two tokens are that close (some 1e-15 of each other).
#pragma once

#include "abi.h"
#include "pool.h"
#include "sampling_filters.h"
#include "sampling_noise.h"

namespace HEADRACE_ISA {
namespace sampling {

struct Winner {
    double value = -std::numeric_limits<double>::infinity();
    int id = 0;

    void offer(double other, int other_id) {
        if (other > value || (other == value && other_id < id)) {
            value = other;
            id = other_id;
        }
    }
};

template <class T>
inline void draw_in_block(const LogitRow<T>& row, uint64_t key, int block, Rank edge, Winner& winner) {
    float scores[BLOCK];
    row.block_scores(block, scores);
    const double largest = largest_noise(output_of(key, 2 * uint64_t(block) + 1));
    const int place = int(output_of(key, 2 * uint64_t(block) + 2) >> (64 - 6));
    const double base = std::exp(-largest);
    const int first = block * BLOCK;
    const auto passes = [&](int i) {
        return scores[i] != IMPOSSIBLE && rank_of(scores[i], uint32_t(first + i)) <= edge;
    };
    if (passes(place)) winner.offer(double(scores[place]) + largest, first + place);
    for (int i = 0; i < BLOCK; ++i) {
        // The noise of the others is less than the largest.
        if (i == place || double(scores[i]) + largest < winner.value || !passes(i)) continue;
        const double exponential = -std::log(uniform(output_of(key ^ TOKENS, uint64_t(first + i) + 1)));
        winner.offer(double(scores[i]) - std::log(base + exponential), first + i);
    }
}

template <class T>
inline int draw(const LogitRow<T>& row, uint64_t key, Rank edge, Scratch& scratch) {
    static const NoiseBounds noise_bound;
    int most = 0;
    for (int block = 0; block < row.blocks; ++block) {
        const float score = scratch.maxima[block];
        scratch.bounds[block] = IMPOSSIBLE;
        if (score == IMPOSSIBLE || rank_of(score, uint32_t(block * BLOCK)) > edge) continue;
        scratch.bounds[block] = double(score) + noise_bound(output_of(key, 2 * uint64_t(block) + 1));
        if (scratch.bounds[block] > scratch.bounds[most]) most = block;
    }
    Winner winner;
    draw_in_block(row, key, most, edge, winner);
    for (int block = 0; block < row.blocks; ++block)
        if (block != most && scratch.bounds[block] != IMPOSSIBLE && scratch.bounds[block] >= winner.value)
            draw_in_block(row, key, block, edge, winner);
    return winner.id;
}

template <class T>
inline int sample_row(const HrSample& call, int number) {
    static thread_local Scratch scratch;
    LogitRow<T> row(static_cast<const T*>(call.logits) + number * call.logits_stride, call.vocabulary);
    scratch.fit(row.blocks);
    row.find_best(scratch.maxima);
    if (row.best == IMPOSSIBLE) return -1;
    if (call.temperature[number] == 0) return row.first_best(scratch.maxima);
    row.temperature = float(call.temperature[number]);
    for (int block = 0; block < row.blocks; ++block) scratch.maxima[block] = row.score(scratch.maxima[block]);
    uint64_t key = 0;
    for (int i = 0; i < 4; ++i) key = mix((key ^ call.place[4 * number + i]) + GOLDEN);
    const Rank edge = filter_edge(row, call.top_k[number], call.top_p[number], call.min_p[number], scratch);
    return draw(row, key, edge, scratch);
}

}  // namespace sampling

template <class T>
void run_sample(headrace::Crew& crew, const HrSample& call) {
    const auto task = [&](int number) { call.tokens[number] = sampling::sample_row<T>(call, number); };
    if (!crew.share(call.rows, task)) return;
}

template <class T>
void sample(headrace::Pool& pool, const HrSample& call) {
    pool.run<HrSample, &run_sample<T>>(call, 1);
}

}  // namespace HEADRACE_ISA
