// How a batch's attention is cut into tasks: made once a step, on one thread, for all layers.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"

namespace HEADRACE_ISA {

struct AttentionPlan {
    std::vector<Item> items;
    std::vector<Merge> merges;
    int partials = 0;
};

// A sequence's queries in items of about MAX_ROWS rows; a long decode's splits apart where that keeps threads busy.
inline void plan_attention(const Ragged& batch, const Shape& shape, int window, int threads, AttentionPlan& plan) {
    plan.items.clear();
    plan.merges.clear();
    plan.partials = 0;
    const int group = shape.group();
    const int per_item = std::max(1, MAX_ROWS / group);
    int64_t total = 0;
    for (int s = 0; s < batch.sequences; ++s) {
        const int first = int(batch.query_start[s]), last = int(batch.query_start[s + 1]) - 1;
        if (last >= first) total += batch.visible[last] * (last - first + 1);
    }
    // What a task may cost before it keeps the others waiting: its share of a quarter of all work.
    const int64_t fair = std::max<int64_t>(2 * SPLIT, total / (4 * int64_t(threads)));
    for (int s = 0; s < batch.sequences; ++s) {
        const int start = int(batch.query_start[s]), stop = int(batch.query_start[s + 1]);
        const int length = stop - start;
        if (length == 0) continue;
        const int pieces = (length + per_item - 1) / per_item;
        for (int piece = 0, first = start; piece < pieces; ++piece) {
            const int count = (stop - first) / (pieces - piece);
            const int seen = int(batch.visible[first + count - 1]);
            int begin = 0;
            if (window) begin = std::max(0, int(batch.visible[first]) - window) / SPLIT;
            const int end = (seen + SPLIT - 1) / SPLIT;
            if (count == 1 && end - begin > 1 && int64_t(seen) > fair) {
                plan.merges.push_back({first, plan.partials, end - begin});
                for (int split = begin; split < end; ++split) plan.items.push_back({s, first, 1, split, split + 1, plan.partials++});
            } else {
                plan.items.push_back({s, first, count, begin, end, -1});
            }
            first += count;
        }
    }
    // The longest first, so that the last tasks are short ones.
    std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& a, const Item& b) {
        return int64_t(a.count) * (a.end - a.begin) > int64_t(b.count) * (b.end - b.begin);
    });
}

}  // namespace HEADRACE_ISA
