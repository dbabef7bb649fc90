// Attention of a ragged batch over paged keys and values.
//
// Keys are taken in tiles of TILE at fixed positions, tiles in splits of SPLIT keys. A split has a softmax of its own,
// kept up to date from tile to tile (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and
// splits are merged in their order (flash-decoding, Dao et al. 2023). A query's result is made in that one order,
// whether its sequence came in one piece or token by token, and whoever computes which split: so it has the same bits.
//
// A page holds, for each key/value head, blocks of 16 tokens in the order that the products want. Keys: for each unit of
// the head size (one float, or two bf16) the 16 tokens' units. Values: for each unit of tokens, every dimension's unit.
// A head's keys in a page and its values follow one another: a decode reads them as one run.
#pragma once

#include <algorithm>

#include "gemm.h"

namespace HEADRACE_ISA {

constexpr int BLOCK = 16;   // tokens
constexpr int TILE = 64;    // keys
constexpr int SPLIT = 512;  // keys
constexpr int MAX_ROWS = 48;
constexpr int MAX_HEAD = 256;

struct Shape {
    int heads, kv_heads, head_dim, page;  // page: tokens, a multiple of BLOCK

    int group() const { return heads / kv_heads; }
    // Where a head's keys of a page begin in the key cache, or its values in the value cache.
    template <class T>
    size_t head_start(int64_t at_page, int kv_head) const {
        return 2 * (size_t(at_page) * kv_heads + kv_head) * page * head_dim * sizeof(T);
    }
};

struct Score {
    float scaling, softcap;  // softcap 0: none
    int window;              // 0: none
    const float* sinks;      // [heads], or none
};

struct Ragged {
    const int64_t* query_start;  // [sequences + 1]
    const int64_t* visible;      // [tokens]
    const int32_t* tables;       // [sequences, table_stride]
    const int64_t* write_slots;  // [tokens]
    int sequences, tokens, table_stride;
};

// Up to `count` consecutive queries of a sequence, against all of their splits or (part >= 0) some.
struct Item {
    int sequence, first, count;
    int begin, end;      // splits
    int partial = -1;    // where the results of its splits are kept until they are merged; -1: they need not be
};

// Running softmax of a few rows.
struct State {
    float top[MAX_ROWS], sum[MAX_ROWS];
    alignas(64) float out[MAX_ROWS * MAX_HEAD];
};

struct AttentionScratch {
    State split, total;
    alignas(64) float scores[MAX_ROWS * TILE];
    alignas(64) float weights[MAX_ROWS * TILE];  // of RowNumber<T>, as queries
    alignas(64) float queries[MAX_ROWS * MAX_HEAD];
    const char* keys[TILE / BLOCK];
    const char* values[TILE / BLOCK];
    int visible[MAX_ROWS];
};

// --- writing ---------------------------------------------------------------------------------------------------------

inline float finite(float x) {
    constexpr float most = std::numeric_limits<float>::max();
    return x != x ? 0.0f : x > most ? most : x < -most ? -most : x;
}

template <class T>
inline T finite_value(T x);

template <>
inline float finite_value<float>(float x) {
    return finite(x);
}

template <>
inline bf16 finite_value<bf16>(bf16 x) {
    if ((x.bits & 0x7f80) != 0x7f80) return x;
    return bf16{uint16_t(x.bits & 0x7f ? 0 : (x.bits & 0x8000) | 0x7f7f)};
}

template <class T>
inline void write_token(const Shape& shape, char* key_cache, char* value_cache, int64_t slot, const T* key, const T* value) {
    constexpr int values = Unit<T>::values;
    const int dim = shape.head_dim;
    const int64_t page = slot / shape.page;
    const int offset = int(slot % shape.page), block = offset / BLOCK, token = offset % BLOCK;
    for (int head = 0; head < shape.kv_heads; ++head) {
        const size_t at = shape.head_start<T>(page, head) + size_t(block) * BLOCK * dim * sizeof(T);
        T* k = (T*)(key_cache + at);
        T* v = (T*)(value_cache + at);
        for (int unit = 0; unit < dim / values; ++unit)
            for (int i = 0; i < values; ++i)
                k[(unit * BLOCK + token) * values + i] = finite_value(key[head * dim + unit * values + i]);
        for (int d = 0; d < dim; ++d) v[((token / values) * dim + d) * values + token % values] = finite_value(value[head * dim + d]);
    }
}

// --- one tile --------------------------------------------------------------------------------------------------------

template <class T, int ROWS>
inline void score_rows(const RowNumber<T>* queries, int dim, const char* const* keys, int blocks, float* scores) {
    constexpr int per_block = BLOCK / W;  // vectors
    constexpr int cols = ROWS * 4 <= MR * NV ? 4 : 2;  // few rows: more columns, to keep as many sums going
    const int vectors = blocks * per_block;
    const int units = dim / Unit<T>::values;
    for (int first = 0; first < vectors; first += cols) {
        const char* b[cols];
        for (int j = 0; j < cols; ++j) {
            const int at = std::min(first + j, vectors - 1);  // an odd last one twice
            b[j] = keys[at / per_block] + 4 * W * (at % per_block);
        }
        vf acc[ROWS][cols];
        for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < cols; ++j) acc[r][j] = vzero();
        multiply<RowUnit<T>, ROWS, cols>((const char*)queries, dim * ptrdiff_t(sizeof(*queries)), b, 4 * BLOCK, units, acc);
        for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < cols; ++j)
                if (first + j < vectors) vstore(scores + r * TILE + (first + j) * W, acc[r][j]);
    }
}

template <class T, int ROWS>
inline void weigh_rows(const RowNumber<T>* weights, int dim, const char* const* values, int blocks, float* out) {
    constexpr int units = BLOCK / Unit<T>::values;
    for (int first = 0; first < dim; first += 2 * W) {
        vf acc[ROWS][2];
        const int second = std::min(first + W, dim - W);  // a head size of an odd number of vectors: the last twice
        for (int r = 0; r < ROWS; ++r) {
            acc[r][0] = vload(out + r * dim + first);
            acc[r][1] = vload(out + r * dim + second);
        }
        for (int block = 0; block < blocks; ++block) {
            const char* b[2] = {values[block] + 4 * first, values[block] + 4 * second};
            multiply<RowUnit<T>, ROWS, 2>((const char*)(weights + block * BLOCK), TILE * ptrdiff_t(sizeof(*weights)), b,
                                          4 * ptrdiff_t(dim), units, acc);
        }
        for (int r = 0; r < ROWS; ++r) {
            vstore(out + r * dim + first, acc[r][0]);
            if (second != first) vstore(out + r * dim + second, acc[r][1]);
        }
    }
}

template <class T, int ROWS>
struct TileRows {
    static void score(int rows, const RowNumber<T>* queries, int dim, const char* const* keys, int blocks, float* scores) {
        if (rows < ROWS) return TileRows<T, ROWS - 1>::score(rows, queries, dim, keys, blocks, scores);
        score_rows<T, ROWS>(queries, dim, keys, blocks, scores);
    }
    static void weigh(int rows, const RowNumber<T>* weights, int dim, const char* const* values, int blocks, float* out) {
        if (rows < ROWS) return TileRows<T, ROWS - 1>::weigh(rows, weights, dim, values, blocks, out);
        weigh_rows<T, ROWS>(weights, dim, values, blocks, out);
    }
};

template <class T>
struct TileRows<T, 0> {
    static void score(int, const RowNumber<T>*, int, const char* const*, int, float*) {}
    static void weigh(int, const RowNumber<T>*, int, const char* const*, int, float*) {}
};

// Keys first_key .. first_key + blocks * BLOCK - 1, of which row r sees those in [visible[r] - window, visible[r]).
template <class T>
inline void attend_tile(AttentionScratch& s, const Score& score, int rows, int dim, int first_key, int blocks) {
    State& state = s.split;
    RowNumber<T>* weights = (RowNumber<T>*)s.weights;
    const RowNumber<T>* queries = (const RowNumber<T>*)s.queries;
    const float hidden = -std::numeric_limits<float>::infinity();
    const int keys = blocks * BLOCK;
    alignas(64) float base[MAX_ROWS], change[MAX_ROWS] = {};
    for (int row = 0, tiles = (rows + MR - 1) / MR, t = 0; t < tiles; ++t) {
        const int count = (rows - row) / (tiles - t);
        TileRows<T, MR>::score(count, queries + row * dim, dim, s.keys, blocks, s.scores + row * TILE);
        row += count;
    }
    for (int r = 0; r < rows; ++r) {
        float* x = s.scores + r * TILE;
        const int end = s.visible[r] - first_key;
        vf top = vset(hidden);
        for (int i = 0; i < keys; i += W) {
            const vf scaled = vmul(vload(x + i), vset(score.scaling));
            vstore(x + i, scaled);
            top = vmax(top, scaled);
        }
        if (end < keys || score.softcap > 0 || score.window) {
            if (score.softcap > 0)
                for (int i = 0; i < keys; ++i) x[i] = score.softcap * std::tanh(x[i] / score.softcap);
            for (int i = std::max(end, 0); i < keys; ++i) x[i] = hidden;
            if (score.window)
                for (int i = 0; i < std::min(end - score.window, keys); ++i) x[i] = hidden;
            top = vload(x);
            for (int i = W; i < keys; i += W) top = vmax(top, vload(x + i));
        }
        const float now = std::max(state.top[r], vlargest(top));
        base[r] = now == hidden ? 0.0f : now;  // nothing seen yet: every weight is exp(-inf) = 0
        change[r] = state.top[r] - base[r];
        state.top[r] = now;
    }
    for (int r = 0; r < rows; r += W) vstore(change + r, vexp(vload(change + r)));
    for (int r = 0; r < rows; ++r) {
        const float* x = s.scores + r * TILE;
        const vf lowered = vset(base[r]);
        vf sum = vzero();
#pragma GCC unroll 4
        for (int i = 0; i < keys; i += W) {
            const vf weight = vexp(vsub(vload(x + i), lowered));
            if constexpr (WIDENS<T>) {
                T rounded[W];
                vstore(rounded, weight);
                vstore(weights + r * TILE + i, vload(rounded));
            } else {
                vstore(weights + r * TILE + i, weight);
            }
            sum = vadd(sum, weight);
        }
        state.sum[r] = state.sum[r] * change[r] + vsum(sum);
        if (change[r] != 1.0f) {
            float* out = state.out + r * dim;
            for (int d = 0; d < dim; d += W) vstore(out + d, vmul(vload(out + d), vset(change[r])));
        }
    }
    for (int row = 0, tiles = (rows + MR - 1) / MR, t = 0; t < tiles; ++t) {
        const int count = (rows - row) / (tiles - t);
        TileRows<T, MR>::weigh(count, weights + row * TILE, dim, s.values, blocks, state.out + row * dim);
        row += count;
    }
}

// --- states ----------------------------------------------------------------------------------------------------------

inline void clear(State& state, int rows, int dim) {
    for (int r = 0; r < rows; ++r) {
        state.top[r] = -std::numeric_limits<float>::infinity();
        state.sum[r] = 0;
        std::memset(state.out + r * dim, 0, dim * sizeof(float));
    }
}

inline float shift(float top, float base) {  // exp(top - base), 0 where top is -inf
    return vfirst(vexp(vset(top - base)));
}

// One row of a later split onto the row of those before it.
inline void merge_row(float& top, float& sum, float* out, float part_top, float part_sum, const float* part, int dim) {
    const float now = std::max(top, part_top);
    if (now == -std::numeric_limits<float>::infinity()) return;
    const float mine = shift(top, now), other = shift(part_top, now);
    for (int d = 0; d < dim; d += W) vstore(out + d, vfma(vload(part + d), vset(other), vmul(vload(out + d), vset(mine))));
    sum = sum * mine + part_sum * other;
    top = now;
}

template <class T>
inline void finish_row(float top, float sum, const float* row, const float* sink, int dim, T* out) {
    float scale = 1.0f;
    if (sink) {
        const float now = std::max(top, *sink);
        scale = shift(top, now);
        sum = sum * scale + shift(*sink, now);
    }
    for (int d = 0; d < dim; d += W) vstore(out + d, vdiv(vmul(vload(row + d), vset(scale)), vset(sum)));
}

// --- items -----------------------------------------------------------------------------------------------------------

// Results of splits that are yet to be merged: for each split, key/value head and row of the group (or of the item).
struct Partials {
    float* top;  // [partials, heads]
    float* sum;
    float* out;  // [partials, heads, head_dim]
};

template <class T>
inline void load_queries(AttentionScratch& s, const Shape& shape, const Ragged& batch, const Item& item, int kv_head,
                         const T* query, ptrdiff_t stride) {
    const int group = shape.group(), dim = shape.head_dim;
    for (int q = 0; q < item.count; ++q) {
        const T* from = query + (item.first + q) * stride + kv_head * group * dim;
        RowNumber<T>* to = (RowNumber<T>*)s.queries + q * group * dim;
        if constexpr (WIDENS<T>)
            widen_rows(from, dim, group, dim, to, dim);
        else
            std::memcpy(to, from, group * dim * sizeof(T));
        for (int g = 0; g < group; ++g) s.visible[q * group + g] = int(batch.visible[item.first + q]);
    }
}

// Where the block of `token` lies in the keys or the values.
template <class T>
inline size_t block_offset(const Shape& shape, const int32_t* table, int kv_head, int token) {
    return shape.head_start<T>(table[token / shape.page], kv_head) + size_t(token % shape.page) * shape.head_dim * sizeof(T);
}

// Have a tile brought near that is about to be read.
template <class T>
inline void prefetch_tile(const Shape& shape, const int32_t* table, int kv_head, int tile, int last, const char* key_cache,
                          const char* value_cache) {
    for (int token = tile; token < std::min(last, tile + TILE); token += BLOCK) {
        const size_t at = block_offset<T>(shape, table, kv_head, token);
        for (size_t line = 0; line < BLOCK * shape.head_dim * sizeof(T); line += 64) {
            __builtin_prefetch(key_cache + at + line, 0, 2);
            __builtin_prefetch(value_cache + at + line, 0, 2);
        }
    }
}

// `after`: the item that this thread is likely to take next, or none.
template <class T>
inline void attend_split(AttentionScratch& s, const Shape& shape, const Ragged& batch, const Score& score, const Item& item,
                         int kv_head, int split, const char* key_cache, const char* value_cache, const Item* after) {
    const int rows = item.count * shape.group(), dim = shape.head_dim;
    const int32_t* table = batch.tables + size_t(item.sequence) * batch.table_stride;
    const int last = int(batch.visible[item.first + item.count - 1]);  // the most that any row sees
    int first = split * SPLIT;
    if (score.window) first = std::max(first, (int(batch.visible[item.first]) - score.window) / TILE * TILE);
    clear(s.split, rows, dim);
    for (int tile = first; tile < std::min(last, (split + 1) * SPLIT); tile += TILE) {
        const int blocks = std::min(TILE / BLOCK, (last - tile + BLOCK - 1) / BLOCK);
        for (int b = 0; b < blocks; ++b) {
            const size_t at = block_offset<T>(shape, table, kv_head, tile + b * BLOCK);
            s.keys[b] = key_cache + at;
            s.values[b] = value_cache + at;
        }
        if (rows <= MR) {  // a decode waits for memory more than it computes
            if (tile + TILE < last)
                prefetch_tile<T>(shape, table, kv_head, tile + TILE, last, key_cache, value_cache);
            else if (kv_head + 1 < shape.kv_heads)
                prefetch_tile<T>(shape, table, kv_head + 1, first, last, key_cache, value_cache);
            else if (after)
                prefetch_tile<T>(shape, batch.tables + size_t(after->sequence) * batch.table_stride, 0, after->begin * SPLIT,
                                 int(batch.visible[after->first + after->count - 1]), key_cache, value_cache);
        }
        attend_tile<T>(s, score, rows, dim, tile, blocks);
    }
}

template <class T>
inline void attend_item(AttentionScratch& s, const Shape& shape, const Ragged& batch, const Score& score, const Item& item,
                        int kv_head, const T* query, ptrdiff_t query_stride, const char* key_cache, const char* value_cache,
                        T* out, ptrdiff_t out_stride, const Partials& partials, const Item* after) {
    const int group = shape.group(), rows = item.count * group, dim = shape.head_dim;
    load_queries(s, shape, batch, item, kv_head, query, query_stride);
    if (item.partial >= 0) {  // a single query
        for (int split = item.begin; split < item.end; ++split) {
            attend_split<T>(s, shape, batch, score, item, kv_head, split, key_cache, value_cache, after);
            const size_t at = size_t(item.partial + split - item.begin) * shape.heads + kv_head * group;
            for (int r = 0; r < rows; ++r) {
                partials.top[at + r] = s.split.top[r];
                partials.sum[at + r] = s.split.sum[r];
                std::memcpy(partials.out + (at + r) * dim, s.split.out + r * dim, dim * sizeof(float));
            }
        }
        return;
    }
    attend_split<T>(s, shape, batch, score, item, kv_head, item.begin, key_cache, value_cache, after);
    State* state = &s.split;
    if (item.end > item.begin + 1) {
        state = &s.total;
        std::memcpy(s.total.top, s.split.top, sizeof(s.total.top));
        std::memcpy(s.total.sum, s.split.sum, sizeof(s.total.sum));
        std::memcpy(s.total.out, s.split.out, size_t(rows) * dim * sizeof(float));
        for (int split = item.begin + 1; split < item.end; ++split) {
            attend_split<T>(s, shape, batch, score, item, kv_head, split, key_cache, value_cache, after);
            for (int r = 0; r < rows; ++r)
                merge_row(s.total.top[r], s.total.sum[r], s.total.out + r * dim, s.split.top[r], s.split.sum[r],
                          s.split.out + r * dim, dim);
        }
    }
    for (int q = 0; q < item.count; ++q)
        for (int g = 0; g < group; ++g) {
            const int r = q * group + g, head = kv_head * group + g;
            finish_row(state->top[r], state->sum[r], state->out + r * dim, score.sinks ? score.sinks + head : nullptr, dim,
                       out + (item.first + q) * out_stride + head * dim);
        }
}

// The tasks of a layer's attention: whole items where they are many, else one key/value head of an item each.
struct AttentionTasks {
    const Item* items;
    int num_items, heads_each;

    AttentionTasks(const Item* items, int num_items, int kv_heads, int threads)
        : items(items), num_items(num_items), heads_each(num_items >= 8 * threads ? kv_heads : 1), kv_heads_(kv_heads) {}

    int count() const { return num_items * (kv_heads_ / heads_each); }

    template <class Attend>
    void run(int task, Attend&& attend) const {
        const int parts = kv_heads_ / heads_each, index = task / parts, first = task % parts * heads_each;
        const Item* after = index + 1 < num_items ? items + index + 1 : nullptr;
        for (int head = first; head < first + heads_each; ++head) attend(items[index], head, after);
    }

   private:
    int kv_heads_;
};

// A query whose splits were computed apart.
struct Merge {
    int token, partial, splits;
};

template <class T>
inline void merge_item(const Shape& shape, const Score& score, const Merge& merge, int head, const Partials& partials,
                       T* out, ptrdiff_t out_stride, float* scratch) {
    const int dim = shape.head_dim;
    size_t at = size_t(merge.partial) * shape.heads + head;
    float top = partials.top[at], sum = partials.sum[at];
    std::memcpy(scratch, partials.out + at * dim, dim * sizeof(float));
    for (int split = 1; split < merge.splits; ++split) {
        at += shape.heads;
        merge_row(top, sum, scratch, partials.top[at], partials.sum[at], partials.out + at * dim, dim);
    }
    finish_row(top, sum, scratch, score.sinks ? score.sinks + head : nullptr, dim, out + merge.token * out_stride + head * dim);
}

}  // namespace HEADRACE_ISA
