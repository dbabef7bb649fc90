// A whole forward pass of a Llama-shaped decoder: RMS norms before attention and before a gated MLP, rotary positions,
// residual connections. One call a step, so that nothing of Python stands between two operations.
//
// Between operations numbers are rounded to the model's type where transformers' modules round them.
#pragma once

#include <chrono>

#include "abi.h"
#include "elementwise.h"
#include "plan.h"

namespace HEADRACE_ISA {

enum Stage { EMBED, NORM, QKV, ROPE, ATTENTION, OUT, GATE_UP, DOWN, LOGITS, STAGES };

inline Weight weight_of(const HrWeight& w) {
    Weight out;
    out.panels = (const char*)w.panels;
    out.scales = w.scales;
    out.bias = w.bias;
    out.n = w.n;
    out.k = w.k;
    out.format = Format(w.format);
    return out;
}

struct Tasks {
    const Item* items;
    const Merge* merges;
    int num_items, num_merges;
};

struct ThreadScratch {
    AttentionScratch attention;
    char* panel = nullptr;  // room_bytes of the widest product
};

// --- phases that a whole pass and single operations share ------------------------------------------------------------

// row(r) for each of so many rows.
template <class Row>
[[nodiscard]] inline bool share_rows(Crew& crew, int threads, int rows, Row&& row) {
    const int each = std::max(4, (rows + 4 * threads - 1) / (4 * threads));
    return crew.share((rows + each - 1) / each, [&](int task) {
        for (int r = task * each; r < std::min(rows, (task + 1) * each); ++r) row(r);
    });
}

// store(panel, row, tile row) for each panel of w and each row of a; `scratch` is this thread's: room_bytes.
template <class T, class Store>
[[nodiscard]] inline bool share_product(Crew& crew, int threads, const Weight& w, const T* a, ptrdiff_t stride, int rows,
                                        char* scratch, Store&& store) {
    const int panels = w.num_panels(), each = panels_per_task(rows, panels, threads);
    return crew.share((panels + each - 1) / each, [&](int task) {
        for (int index = task * each; index < std::min(panels, (task + 1) * each); ++index)
            panel_product<T>(w, index, a, stride, rows, scratch, panel_after<T>(w, index, each, threads),
                             [&](int row, const float* tile) { store(index, row, tile); });
    });
}

// Panel `index` of a row of `width` numbers, from its tile.
template <class T>
inline void store_tile(const float* tile, int index, int width, T* row) {
    T* out = row + index * PANEL;
    const int columns = std::min(PANEL, width - index * PANEL);
    int col = 0;
    for (; col + W <= columns; col += W) vstore(out + col, vload(tile + col));
    for (; col < columns; ++col) out[col] = from_float<T>(tile[col]);
}

// Attention of one layer, whose keys and values are written; `scratch` is this thread's.
template <class T>
[[nodiscard]] inline bool share_attention(Crew& crew, int threads, const Shape& shape, const Ragged& batch,
                                          const Score& score, const Tasks& tasks, const T* query, ptrdiff_t query_stride,
                                          const char* keys, const char* values, T* out, ptrdiff_t out_stride,
                                          const Partials& partials, AttentionScratch& scratch) {
    const AttentionTasks shares(tasks.items, tasks.num_items, shape.kv_heads, threads);
    const bool attended = crew.share(shares.count(), [&](int task) {
        shares.run(task, [&](const Item& item, int head, const Item* after) {
            attend_item<T>(scratch, shape, batch, score, item, head, query, query_stride, keys, values, out, out_stride,
                           partials, after);
        });
    });
    if (!attended || !tasks.num_merges) return attended;
    return crew.share(tasks.num_merges, [&](int task) {
        for (int head = 0; head < shape.heads; ++head)
            merge_item<T>(shape, score, tasks.merges[task], head, partials, out, out_stride, scratch.split.out);
    });
}

template <class T>
struct DecoderContext {
    const HrModel* model;
    HrBatch batch;
    Tasks tasks[2];  // layers without a window, and with one
    Partials partials;
    ThreadScratch* scratch;  // [threads]
    double* seconds;         // [STAGES]
    T *residual, *normed, *qkv, *attended, *inner, *kept;
    int threads;
};

// Phases that a pass goes through at most.
inline int decoder_phases(const HrModel& model) { return 10 * model.layers + 8; }

template <class T>
class DecoderPass {
   public:
    DecoderPass(Crew& crew, const DecoderContext<T>& c) : crew_(crew), c_(c), m_(*c.model), at_(now()) {
        shape_ = {m_.heads, m_.kv_heads, m_.head_dim, m_.page};
        ragged_ = {c.batch.query_start, c.batch.visible,       c.batch.tables,      c.batch.write_slots,
                   c.batch.num_sequences, c.batch.num_tokens, c.batch.table_stride};
    }

    void run() {
        const int tokens = c_.batch.num_tokens, keep = c_.batch.num_keep;
        if (!by_rows(tokens, [&](int row) { embed(row); }) || !took(EMBED)) return;
        for (int index = 0; index < m_.layers; ++index) {
            const HrLayer& layer = m_.layer[index];
            if (!norm(layer.attention_norm, tokens, c_.residual) || !project(layer.qkv, tokens)) return;
            if (!by_rows(tokens, [&](int row) { rotate_and_write(layer, row); }) || !took(ROPE)) return;
            const bool last = index + 1 == m_.layers;
            if (last && keep == 0) return;  // the cache is filled, and nothing else is wanted
            if (!attend(layer)) return;
            int rows = tokens;
            if (last) {  // what follows speaks of single rows: only those that are wanted
                if (!crew_.share(1, [&](int) { compact(); })) return;
                rows = keep;
            }
            if (!add_product(layer.out, c_.attended, width(), rows, OUT)) return;
            if (!norm(layer.mlp_norm, rows, c_.residual) || !gate(layer.gate_up, rows)) return;
            if (!add_product(layer.down, c_.inner, m_.inner, rows, DOWN)) return;
        }
        if (!norm(m_.final_norm, keep, c_.residual)) return;
        logits(keep);
    }

   private:
    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    bool took(Stage stage) {  // always true
        if (crew_.thread == 0) {
            const double t = now();
            c_.seconds[stage] += t - at_;
            at_ = t;
        }
        return true;
    }

    int width() const { return m_.heads * m_.head_dim; }
    int qkv_width() const { return (m_.heads + 2 * m_.kv_heads) * m_.head_dim; }

    template <class Row>
    bool by_rows(int rows, Row&& row) {
        return share_rows(crew_, c_.threads, rows, row);
    }

    template <class Store>
    bool product(const HrWeight& w, const T* a, int k, int rows, Store&& store) {
        return share_product<T>(crew_, c_.threads, weight_of(w), a, k, rows, c_.scratch[crew_.thread].panel, store);
    }

    void embed(int row) {
        const int64_t token = std::min<int64_t>(std::max<int64_t>(c_.batch.tokens[row], 0), m_.embedding_rows - 1);
        T* out = c_.residual + size_t(row) * m_.hidden;
        if (m_.embedding)
            std::memcpy(out, (const T*)m_.embedding + size_t(token) * m_.hidden, m_.hidden * sizeof(T));
        else
            unpack_row<T>(weight_of(m_.head), int(token), out);
    }

    bool norm(const void* weight, int rows, const T* from) {
        return by_rows(rows, [&](int row) {
            rms_norm_row<T>(from + size_t(row) * m_.hidden, (const T*)weight, m_.hidden, m_.eps, c_.normed + size_t(row) * m_.hidden);
        }) && took(NORM);
    }

    bool project(const HrWeight& w, int rows) {
        const int width = qkv_width();
        return product(w, c_.normed, m_.hidden, rows, [&](int index, int row, const float* tile) {
            store_tile(tile, index, width, c_.qkv + size_t(row) * width);
        }) && took(QKV);
    }

    void rotate_and_write(const HrLayer& layer, int row) {
        const int dim = m_.head_dim;
        T* query = c_.qkv + size_t(row) * qkv_width();
        T* key = query + m_.heads * dim;
        const T* value = key + m_.kv_heads * dim;
        for (int head = 0; head < m_.heads + m_.kv_heads; ++head) {
            T* x = query + head * dim;
            const void* weight = head < m_.heads ? layer.query_norm : layer.key_norm;
            if (weight) rms_norm_row<T>(x, (const T*)weight, dim, m_.eps, x);
            if (layer.rotary) {
                const int64_t position = std::min<int64_t>(std::max<int64_t>(c_.batch.positions[row], 0), m_.positions - 1);
                const size_t at = size_t(position) * m_.rotary_stride;
                rotate_head<T>(x, (const T*)m_.cos + at, (const T*)m_.sin + at, layer.rotary);
            }
        }
        write_token<T>(shape_, (char*)layer.key_cache, (char*)layer.value_cache, c_.batch.write_slots[row], key, value);
    }

    bool attend(const HrLayer& layer) {
        const Tasks& tasks = c_.tasks[layer.window ? 1 : 0];
        const Score score{layer.scaling, 0.0f, layer.window, nullptr};
        const char *keys = (const char*)layer.key_cache, *values = (const char*)layer.value_cache;
        const bool alive = share_attention<T>(crew_, c_.threads, shape_, ragged_, score, tasks, c_.qkv, qkv_width(), keys,
                                              values, c_.attended, width(), c_.partials, c_.scratch[crew_.thread].attention);
        if (!alive) return false;
        return took(ATTENTION);
    }

    void compact() {  // through other memory: a row may be wanted twice
        const int keep = c_.batch.num_keep;
        for (int i = 0; i < keep; ++i) {
            const size_t row = size_t(c_.batch.keep[i]);
            std::memcpy(c_.kept + size_t(i) * m_.hidden, c_.residual + row * m_.hidden, m_.hidden * sizeof(T));
            std::memcpy(c_.qkv + size_t(i) * width(), c_.attended + row * width(), width() * sizeof(T));
        }
        std::memcpy(c_.residual, c_.kept, size_t(keep) * m_.hidden * sizeof(T));
        std::memcpy(c_.attended, c_.qkv, size_t(keep) * width() * sizeof(T));
    }

    bool add_product(const HrWeight& w, const T* a, int k, int rows, Stage stage) {
        return product(w, a, k, rows, [&](int index, int row, const float* tile) {
            T* out = c_.residual + size_t(row) * m_.hidden + index * PANEL;
            const int columns = std::min(PANEL, m_.hidden - index * PANEL);
            for (int col = 0; col < columns; col += W) vstore(out + col, vadd(vload(out + col), vrounded<T>(vload(tile + col))));
        }) && took(stage);
    }

    bool gate(const HrWeight& w, int rows) {
        const Activation kind = Activation(m_.activation);
        return product(w, c_.normed, m_.hidden, rows, [&](int index, int row, const float* tile) {
            T* out = c_.inner + size_t(row) * m_.inner + index * (PANEL / 2);
            for (int col = 0; col < PANEL / 2; col += W) {
                const vf gate = activate<T>(kind, vrounded<T>(vload(tile + col)));
                vstore(out + col, vmul(gate, vrounded<T>(vload(tile + PANEL / 2 + col))));
            }
        }) && took(GATE_UP);
    }

    void logits(int rows) {
        const int vocabulary = m_.head.n;
        T* all = (T*)c_.batch.logits;
        const bool alive = product(m_.head, c_.normed, m_.hidden, rows, [&](int index, int row, const float* tile) {
            store_tile(tile, index, vocabulary, all + size_t(row) * c_.batch.logits_stride);
        });
        if (alive) took(LOGITS);
    }

    Crew& crew_;
    const DecoderContext<T>& c_;
    const HrModel& m_;
    Shape shape_;
    Ragged ragged_;
    double at_;
};

template <class T>
void run_decoder(Crew& crew, const DecoderContext<T>& context) {
    DecoderPass<T>(crew, context).run();
}

// What a model needs beside its weights: room for a step's numbers, which grows with the largest step seen.
template <class T>
class Decoder {
   public:
    Decoder(const HrModel& model, Pool& pool) : model_(model), layers_(model.layer, model.layer + model.layers), pool_(pool) {
        model_.layer = layers_.data();
        for (const HrLayer& layer : layers_)
            if (layer.window) window_ = layer.window;
        scratch_.resize(pool.threads());
        size_t widest = size_t(model_.inner > model_.hidden ? model_.inner : model_.hidden);
        widest = std::max(widest, size_t(model_.heads) * model_.head_dim);
        for (ThreadScratch& s : scratch_) {
            panels_.emplace_back(new char[room_bytes<T>(int(widest)) + 64]);
            s.panel = (char*)((uintptr_t(panels_.back().get()) + 63) & ~uintptr_t(63));
        }
    }
    ~Decoder() { pool_.quiesce(); }

    void forward(const HrBatch& batch) {
        const Shape shape{model_.heads, model_.kv_heads, model_.head_dim, model_.page};
        const Ragged ragged{batch.query_start,   batch.visible,    batch.tables,      batch.write_slots,
                            batch.num_sequences, batch.num_tokens, batch.table_stride};
        grow(std::max(batch.num_tokens, batch.num_keep));
        DecoderContext<T> c{};
        c.model = &model_;
        c.batch = batch;
        c.threads = pool_.threads();
        int partials = 0;
        for (int windowed = 0; windowed < 2; ++windowed) {
            if (windowed && !window_) continue;
            AttentionPlan& plan = plans_[windowed];
            plan_attention(ragged, shape, windowed ? window_ : 0, pool_.threads(), plan);
            c.tasks[windowed] = {plan.items.data(), plan.merges.data(), int(plan.items.size()), int(plan.merges.size())};
            partials = std::max(partials, plan.partials);
        }
        top_.resize(std::max(top_.size(), size_t(partials) * shape.heads));
        sum_.resize(top_.size());
        out_.resize(top_.size() * shape.head_dim);
        c.partials = {top_.data(), sum_.data(), out_.data()};
        c.scratch = scratch_.data();
        c.seconds = seconds_;
        c.residual = residual_.data();
        c.normed = normed_.data();
        c.qkv = qkv_.data();
        c.attended = attended_.data();
        c.inner = inner_.data();
        c.kept = kept_.data();
        pool_.run<DecoderContext<T>, &run_decoder<T>>(c, decoder_phases(model_));
    }

    void take_seconds(double* out) {
        for (int i = 0; i < STAGES; ++i) {
            out[i] = seconds_[i];
            seconds_[i] = 0;
        }
    }

   private:
    void grow(int tokens) {
        const size_t rows = size_t(tokens);
        if (rows <= rows_) return;
        rows_ = rows;
        residual_.resize(rows * model_.hidden);
        kept_.resize(rows * model_.hidden);
        normed_.resize(rows * model_.hidden);
        qkv_.resize(rows * (model_.heads + 2 * model_.kv_heads) * model_.head_dim);
        attended_.resize(rows * model_.heads * model_.head_dim);
        inner_.resize(rows * model_.inner);
    }

    HrModel model_;
    std::vector<HrLayer> layers_;
    Pool& pool_;
    int window_ = 0;
    size_t rows_ = 0;
    std::vector<T> residual_, kept_, normed_, qkv_, attended_, inner_;
    std::vector<float> top_, sum_, out_;
    AttentionPlan plans_[2];
    std::vector<ThreadScratch> scratch_;
    std::vector<std::unique_ptr<char[]>> panels_;
    double seconds_[STAGES] = {};
};

}  // namespace HEADRACE_ISA
