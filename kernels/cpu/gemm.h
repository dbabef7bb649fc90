// Matrix products with packed weights: out[m, n] = sum over k of a[m, k] * weight[n, k].
//
// A row's sums run over k in one order, in one accumulator per output, whatever rows stand beside it: so a row has the
// same bits alone and in any batch (DESIGN 9). Rows are taken up to MR at once and columns 32 at a time, as many
// accumulators as registers hold (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
//
// A packed weight is a row of panels, each of 32 columns: for each unit of k (four bytes: one float, or two bf16) the
// unit of every column, 128 bytes. Panels follow one another in memory: a step reads its weights as one stream.
// int8 weights (int8.h) take a byte for each k, and have one float scale a column.
#pragma once

#include "int8.h"
#include "pool.h"
#include "vec.h"

namespace HEADRACE_ISA {

using headrace::Crew;
using headrace::Pool;

#if defined(__AVX512F__)
constexpr int MR = 12, NV = 2;  // 24 of 32 registers accumulate
#elif defined(__AVX2__)
constexpr int MR = 6, NV = 2;  // 12 of 16
#else
constexpr int MR = 4, NV = 2;
#endif

// Where the processor has no products of bf16, rows are widened to floats before they are multiplied, and so is a panel
// that more than one tile of rows reads. The terms and their order stay, and so every bit.
#if defined(__AVX512BF16__)
template <class T>
constexpr bool WIDENS = false;
#else
template <class T>
constexpr bool WIDENS = std::is_same_v<T, bf16>;
#endif

// Rows as they are multiplied by columns of T: their units, their numbers.
template <class T>
using RowUnit = std::conditional_t<WIDENS<T>, wide_rows, T>;
template <class T>
using RowNumber = std::conditional_t<WIDENS<T>, float, T>;

// acc[r][j] += A's row r times the columns of b[j], over `units` units.
template <class T, int ROWS, int COLS>
inline __attribute__((always_inline)) void multiply(const char* a, ptrdiff_t row_bytes, const char* const* b,
                                                    ptrdiff_t unit_bytes, int units, vf (&acc)[ROWS][COLS]) {
    const char* column[COLS];
    for (int j = 0; j < COLS; ++j) column[j] = b[j];
    for (int unit = 0; unit < units; ++unit) {
        for (int r = 0; r < ROWS; ++r) {
            auto x = Unit<T>::broadcast(a + r * row_bytes + Unit<T>::row_bytes * unit);
            for (int j = 0; j < COLS; ++j) acc[r][j] = Unit<T>::mac(acc[r][j], x, column[j]);
        }
        for (int j = 0; j < COLS; ++j) column[j] += unit_bytes;
    }
}

// What is to be brought near while a panel is multiplied: the next one's bytes, a share in each pass over this one. The
// first pass over a panel waits for memory and the later ones do not, unless it is spread like that.
struct Ahead {
    const char* at = nullptr;
    ptrdiff_t step = 0;  // bytes a unit
};

// A group of COLS * W columns of a panel for ROWS rows, into tile [ROWS][PANEL] from column `first` on.
template <class T, int ROWS>
inline void multiply_group(const char* a, ptrdiff_t row_bytes, const char* panel, int units, int first, float* tile, Ahead ahead) {
    vf acc[ROWS][NV];
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < NV; ++j) acc[r][j] = vzero();
    const char* column = panel + 4 * first;
    for (int unit = 0; unit < units; ++unit) {
        __builtin_prefetch(ahead.at);
        ahead.at += ahead.step;
        for (int r = 0; r < ROWS; ++r) {
            auto x = Unit<T>::broadcast(a + r * row_bytes + Unit<T>::row_bytes * unit);
            for (int j = 0; j < NV; ++j) acc[r][j] = Unit<T>::mac(acc[r][j], x, column + 4 * W * j);
        }
        column += 4 * PANEL;
    }
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < NV; ++j) vstore(tile + r * PANEL + first + j * W, acc[r][j]);
}

// How far before its use an int8 panel is asked for: beyond the page that the processor's own prefetching stays in.
constexpr int AHEAD_BYTES = 2048;

// The same of an int8 panel, with rows of U. With `expanded` the panel is left there, for the rows that follow: as one of
// T, or of float if T is widened.
template <class T, class U, int ROWS, int FIRST>
inline void multiply_group_int8(const char* a, ptrdiff_t row_bytes, const int8_t* panel, int units, float* tile, char* expanded) {
    vf acc[ROWS][NV];
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < NV; ++j) acc[r][j] = vzero();
    constexpr int size = Unit<T>::values * PANEL;
    const int8_t* end = panel + ptrdiff_t(units) * size;
    typename Int8<T>::Column next[NV];
    if constexpr (Int8<T>::AHEAD) Int8<T>::template load<NV>(panel, FIRST, next);
    for (int unit = 0; unit < units; ++unit) {
        __builtin_prefetch(panel + AHEAD_BYTES);
        typename Int8<T>::Column b[NV];
        if constexpr (Int8<T>::AHEAD) {  // converted during the products of the unit before
            for (int j = 0; j < NV; ++j) b[j] = next[j];
            if (panel + size < end) panel += size;
            Int8<T>::template load<NV>(panel, FIRST, next);
        } else {
            Int8<T>::template load<NV>(panel, FIRST, b);
            panel += size;
        }
        if (expanded)
            for (int j = 0; j < NV; ++j) Int8<T>::store(expanded, unit, FIRST + j * W, b[j]);
        for (int r = 0; r < ROWS; ++r) {
            const auto x = Unit<U>::broadcast(a + r * row_bytes + Unit<U>::row_bytes * unit);
            for (int j = 0; j < NV; ++j) acc[r][j] = Int8<T>::mac(acc[r][j], x, b[j]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < NV; ++j) vstore(tile + r * PANEL + FIRST + j * W, acc[r][j]);
}

template <class U, int ROWS>
struct Rows {
    static void multiply_panel(int rows, const char* a, ptrdiff_t row_bytes, const char* panel, int units, float* tile,
                               Ahead ahead) {
        if (rows < ROWS) return Rows<U, ROWS - 1>::multiply_panel(rows, a, row_bytes, panel, units, tile, ahead);
        for (int first = 0; first < PANEL; first += NV * W)
            multiply_group<U, ROWS>(a, row_bytes, panel, units, first, tile, ahead);
    }
    template <class T>
    static void multiply_int8(int rows, const char* a, ptrdiff_t row_bytes, const int8_t* panel, int units, float* tile,
                              char* expanded) {
        if (rows < ROWS)
            return Rows<U, ROWS - 1>::template multiply_int8<T>(rows, a, row_bytes, panel, units, tile, expanded);
        groups_int8<T, 0>(a, row_bytes, panel, units, tile, expanded);
    }

   private:
    template <class T, int FIRST>
    static void groups_int8(const char* a, ptrdiff_t row_bytes, const int8_t* panel, int units, float* tile, char* expanded) {
        multiply_group_int8<T, U, ROWS, FIRST>(a, row_bytes, panel, units, tile, expanded);
        if constexpr (FIRST + NV * W < PANEL) groups_int8<T, FIRST + NV * W>(a, row_bytes, panel, units, tile, expanded);
    }
};

template <class U>
struct Rows<U, 0> {
    static void multiply_panel(int, const char*, ptrdiff_t, const char*, int, float*, Ahead) {}
    template <class T>
    static void multiply_int8(int, const char*, ptrdiff_t, const int8_t*, int, float*, char*) {}
};

enum class Format : int { plain = 0, int8 = 1 };

struct Weight {
    const char* panels = nullptr;
    const float* scales = nullptr;  // [n], int8
    const void* bias = nullptr;     // [n] of T, or none
    int n = 0, k = 0;
    Format format = Format::plain;

    int num_panels() const { return (n + PANEL - 1) / PANEL; }
};

template <class T>
inline int units_of(int k) {
    return (k + Unit<T>::values - 1) / Unit<T>::values;
}

template <class T>
inline size_t panel_bytes(const Weight& w) {
    size_t full = size_t(units_of<T>(w.k)) * 4 * PANEL;
    return w.format == Format::int8 ? full / 4 * Unit<T>::values : full;
}

// Room of a thread for a panel that is expanded and a tile of rows that are widened, of products over k.
template <class T>
inline size_t room_bytes(int k) {
    const size_t units = units_of<T>(k);
    return WIDENS<T> ? units * 8 * (PANEL + MR) : units * 4 * PANEL;
}

// `count` rows of k numbers to floats, `width` to a row.
template <class T>
inline void widen_rows(const T* a, ptrdiff_t stride, int count, int k, float* out, int width) {
    for (int r = 0; r < count; ++r, a += stride, out += width) {
        int at = 0;
        for (; at + W <= k; at += W) vstore(out + at, vload(a + at));
        for (; at < width; ++at) out[at] = at < k ? to_float(a[at]) : 0;
    }
}

// A panel of bf16 to one of floats.
inline void widen_panel(const char* panel, int units, float* out) {
    for (int unit = 0; unit < units; ++unit, panel += 4 * PANEL, out += 2 * PANEL)
        for (int c = 0; c < PANEL; c += W) {
            const vi pairs = vload_bits(panel + 4 * c);
            vstore(out + c, vlow(pairs));
            vstore(out + PANEL + c, vhigh(pairs));
        }
}

// `next`: a panel that this thread is likely to take after this one, or null; `scratch`: room_bytes.
// Panel `index` of w times all `rows` of a; store(row, tile row of PANEL floats) for each row, in order.
template <class T, class Store>
inline void panel_product(const Weight& w, int index, const T* a, ptrdiff_t stride, int rows, char* scratch, const char* next, Store&& store) {
    const int units = units_of<T>(w.k);
    const char* panel = w.panels + size_t(index) * panel_bytes<T>(w);
    alignas(64) float tile[MR * PANEL];
    const int tiles = (rows + MR - 1) / MR;
    const ptrdiff_t bytes = ptrdiff_t(panel_bytes<T>(w));
    const bool spread = next && tiles > 2;  // with fewer passes the processor's own prefetching does as well
    for (int t = 0, row = 0; t < tiles; ++t) {
        const Ahead ahead = spread ? Ahead{next + t * bytes / tiles, bytes / units / tiles} : Ahead{panel, 0};
        const int count = (rows - row) / (tiles - t);  // even shares: no tile of a single row at the end
        if constexpr (WIDENS<T>) {
            float* rows_wide = (float*)(scratch + size_t(units) * 8 * PANEL);
            const ptrdiff_t row_bytes = ptrdiff_t(units) * 8;
            widen_rows(a + row * stride, stride, count, w.k, rows_wide, 2 * units);
            const char* first = (const char*)rows_wide;
            if (w.format == Format::int8 && t == 0) {
                Rows<wide_rows, MR>::template multiply_int8<T>(count, first, row_bytes, (const int8_t*)panel, units, tile,
                                                               tiles > 1 ? scratch : nullptr);
            } else if (tiles == 1) {
                Rows<wide_rows, MR>::multiply_panel(count, first, row_bytes, panel, units, tile, ahead);
            } else {
                if (t == 0) widen_panel(panel, units, (float*)scratch);
                Rows<float, MR>::multiply_panel(count, first, row_bytes, scratch, 2 * units, tile, {ahead.at, ahead.step / 2});
            }
        } else {
            const char* first = (const char*)(a + row * stride);
            const ptrdiff_t row_bytes = stride * ptrdiff_t(sizeof(T));
            if (w.format == Format::int8 && t == 0) {
                Rows<T, MR>::template multiply_int8<T>(count, first, row_bytes, (const int8_t*)panel, units, tile,
                                                       tiles > 1 ? scratch : nullptr);
                panel = scratch;
            } else {
                Rows<T, MR>::multiply_panel(count, first, row_bytes, panel, units, tile, ahead);
            }
        }
        if (w.format == Format::int8) {
            for (int c = 0; c < PANEL; c += W) {
                const vf scale = vload(w.scales + index * PANEL + c);
                for (int r = 0; r < count; ++r) {
                    float* p = tile + r * PANEL + c;
                    vstore(p, vmul(vload(p), scale));
                }
            }
        }
        if (w.bias) {
            for (int c = 0; c < PANEL; c += W) {
                const vf bias = vload((const T*)w.bias + index * PANEL + c);
                for (int r = 0; r < count; ++r) {
                    float* p = tile + r * PANEL + c;
                    vstore(p, vadd(vload(p), bias));
                }
            }
        }
        for (int r = 0; r < count; ++r) store(row + r, tile + r * PANEL);
        row += count;
    }
}

// Where the panel lies that a thread takes after `index`, if tasks of `each` panels are taken in turns; null at the end.
template <class T>
inline const char* panel_after(const Weight& w, int index, int each, int threads) {
    const int task = index / each;
    const int then = index + 1 < (task + 1) * each ? index + 1 : (task + threads) * each;
    return then < w.num_panels() ? w.panels + size_t(then) * panel_bytes<T>(w) : nullptr;
}

// Tasks for the panels of a product: few rows make a panel's work short, so that several are taken at once.
inline int panels_per_task(int rows, int num_panels, int threads) {
    int wanted = rows >= 16 ? 1 : rows >= 4 ? 2 : 4;
    int fair = num_panels / (4 * threads);
    return wanted < fair ? wanted : fair < 1 ? 1 : fair;
}

// --- packing ---------------------------------------------------------------------------------------------------------

// Panel `index` of a packed weight from rows [n][k] of T; columns past n and k past the end are zeros.
template <class T>
inline void pack_panel(const T* weight, ptrdiff_t stride, int n, int k, int index, char* panels) {
    const int units = units_of<T>(k), values = Unit<T>::values;
    T* out = (T*)(panels + size_t(index) * units * 4 * PANEL);
    for (int c = 0; c < PANEL; ++c) {
        const int column = index * PANEL + c;
        for (int unit = 0; unit < units; ++unit)
            for (int v = 0; v < values; ++v) {
                const int at = unit * values + v;
                T x = column < n && at < k ? weight[column * stride + at] : T{};
                out[(size_t(unit) * PANEL + c) * values + v] = x;
            }
    }
}

// The same to int8: each column by its own largest magnitude over 127.
template <class T>
inline void pack_panel_int8(const T* weight, ptrdiff_t stride, int n, int k, int index, char* panels, float* scales) {
    const int units = units_of<T>(k), values = Unit<T>::values;
    int8_t* out = (int8_t*)(panels + size_t(index) * units * values * PANEL);
    for (int c = 0; c < PANEL; ++c) {
        const int column = index * PANEL + c;
        float largest = 0;
        if (column < n)
            for (int at = 0; at < k; ++at) largest = std::fmax(largest, std::fabs(to_float(weight[column * stride + at])));
        const float scale = largest / 127;
        scales[column] = scale;
        for (int unit = 0; unit < units; ++unit)
            for (int v = 0; v < values; ++v) {
                const int at = unit * values + v;
                float x = column < n && at < k && scale > 0 ? to_float(weight[column * stride + at]) / scale : 0;
                out[size_t(unit) * PANEL * values + Int8<T>::place(c, v)] = int8_t(std::lrintf(std::fmin(std::fmax(x, -127.f), 127.f)));
            }
    }
}

// Row `row` of a packed plain weight (an embedding that is tied to the head).
template <class T>
inline void unpack_row(const Weight& w, int row, T* out) {
    const int units = units_of<T>(w.k), values = Unit<T>::values;
    const T* panel = (const T*)(w.panels + size_t(row / PANEL) * panel_bytes<T>(w)) + (row % PANEL) * values;
    for (int unit = 0; unit < units; ++unit)
        for (int v = 0; v < values && unit * values + v < w.k; ++v) out[unit * values + v] = panel[size_t(unit) * PANEL * values + v];
}

}  // namespace HEADRACE_ISA
