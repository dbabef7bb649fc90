// Single operations, for models that run module by module: attention over pages, a packed product, packing.
#pragma once

#include <memory>

#include "decoder.h"

namespace HEADRACE_ISA {

template <class T>
struct AttentionContext {
    HrBatch batch;
    HrAttention call;
    Tasks tasks;
    Partials partials;
    ThreadScratch* scratch;
    int threads;
};

template <class T>
void run_attention(Crew& crew, const AttentionContext<T>& c) {
    const HrAttention& a = c.call;
    const Shape shape{a.heads, a.kv_heads, a.head_dim, a.page};
    const Ragged ragged{c.batch.query_start,   c.batch.visible,    c.batch.tables,      c.batch.write_slots,
                        c.batch.num_sequences, c.batch.num_tokens, c.batch.table_stride};
    const Score score{a.scaling, a.softcap, a.window, a.sinks};
    const bool written = share_rows(crew, c.threads, c.batch.num_tokens, [&](int row) {
        write_token<T>(shape, (char*)a.key_cache, (char*)a.value_cache, c.batch.write_slots[row],
                       (const T*)a.key + row * a.key_stride, (const T*)a.value + row * a.value_stride);
    });
    if (!written) return;
    (void)share_attention<T>(crew, c.threads, shape, ragged, score, c.tasks, (const T*)a.query, a.query_stride,
                             (const char*)a.key_cache, (const char*)a.value_cache, (T*)a.out, a.out_stride, c.partials,
                             c.scratch[crew.thread].attention);
}

// The calling thread's own room: one caller at a time has the pool.
struct AttentionRoom {
    AttentionPlan plan;
    std::vector<float> top, sum, out;
    std::unique_ptr<ThreadScratch[]> scratch;
    int threads = 0;
};

template <class T>
void attention(Pool& pool, const HrBatch& batch, const HrAttention& call) {
    static AttentionRoom room;
    const Shape shape{call.heads, call.kv_heads, call.head_dim, call.page};
    const Ragged ragged{batch.query_start,   batch.visible,    batch.tables,      batch.write_slots,
                        batch.num_sequences, batch.num_tokens, batch.table_stride};
    plan_attention(ragged, shape, call.window, pool.threads(), room.plan);
    const size_t rows = std::max(room.top.size(), size_t(room.plan.partials) * call.heads);
    room.top.resize(rows);
    room.sum.resize(rows);
    room.out.resize(std::max(room.out.size(), rows * call.head_dim));
    if (room.threads != pool.threads()) {
        room.scratch.reset(new ThreadScratch[pool.threads()]);
        room.threads = pool.threads();
    }
    AttentionContext<T> c{};
    c.batch = batch;
    c.call = call;
    c.tasks = {room.plan.items.data(), room.plan.merges.data(), int(room.plan.items.size()), int(room.plan.merges.size())};
    c.partials = {room.top.data(), room.sum.data(), room.out.data()};
    c.scratch = room.scratch.get();
    c.threads = pool.threads();
    pool.run<AttentionContext<T>, &run_attention<T>>(c, 3);
}

template <class T>
struct LinearContext {
    Weight weight;
    const T* a;
    T* out;
    int64_t a_stride, out_stride;
    int rows, threads;
    char* const* panels;  // [threads]: room_bytes
};

template <class T>
void run_linear(Crew& crew, const LinearContext<T>& c) {
    (void)share_product<T>(crew, c.threads, c.weight, c.a, c.a_stride, c.rows, c.panels[crew.thread],
                           [&](int index, int row, const float* tile) {
                               store_tile(tile, index, c.weight.n, c.out + row * c.out_stride);
                           });
}

template <class T>
void linear(Pool& pool, const HrWeight& weight, const void* a, int64_t a_stride, int rows, void* out, int64_t out_stride) {
    static std::vector<std::vector<char>> room;
    static std::vector<char*> panels;
    LinearContext<T> c{};
    c.weight = weight_of(weight);
    if (c.weight.format == Format::int8 || WIDENS<T>) {
        const size_t bytes = room_bytes<T>(weight.k) + 64;
        room.resize(pool.threads());
        panels.resize(pool.threads());
        for (size_t i = 0; i < room.size(); ++i) {
            if (room[i].size() < bytes) room[i].resize(bytes);
            panels[i] = (char*)((uintptr_t(room[i].data()) + 63) & ~uintptr_t(63));
        }
    } else {
        panels.resize(pool.threads());
    }
    c.panels = panels.data();
    c.a = (const T*)a;
    c.out = (T*)out;
    c.a_stride = a_stride;
    c.out_stride = out_stride;
    c.rows = rows;
    c.threads = pool.threads();
    pool.run<LinearContext<T>, &run_linear<T>>(c, 1);
}

template <class T>
struct PackContext {
    const T* source;
    int64_t stride;
    int n, k, format;
    char* panels;
    float* scales;
};

template <class T>
void run_pack(Crew& crew, const PackContext<T>& c) {
    if (!crew.share((c.n + PANEL - 1) / PANEL, [&](int index) {
            if (c.format == int(Format::int8))
                pack_panel_int8<T>(c.source, c.stride, c.n, c.k, index, c.panels, c.scales);
            else
                pack_panel<T>(c.source, c.stride, c.n, c.k, index, c.panels);
        }))
        return;
}

template <class T>
void pack(Pool& pool, const void* source, int64_t stride, int n, int k, int format, void* panels, float* scales) {
    const PackContext<T> c{(const T*)source, stride, n, k, format, (char*)panels, scales};
    pool.run<PackContext<T>, &run_pack<T>>(c, 1);
}

}  // namespace HEADRACE_ISA
