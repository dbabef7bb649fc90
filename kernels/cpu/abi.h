// What crosses the C ABI. Every struct is plain and is mirrored, field for field, in kernels/cpu/library.py.
#pragma once

#include <cstdint>

extern "C" {

// A packed matrix [n, k] (see gemm.h). format: 0 as it is, 1 int8 with a scale for each of n.
struct HrWeight {
    const void* panels;
    const float* scales;
    const void* bias;  // [n rounded up to 32] of the type, or null
    int32_t n, k;
    int32_t format;
};

struct HrLayer {
    HrWeight qkv;      // queries, keys, values: [(heads + 2 kv heads) * head size, hidden]
    HrWeight out;      // [hidden, heads * head size]
    HrWeight gate_up;  // [2 * inner, hidden], 16 rows of gate, 16 of up, 16 of gate...
    HrWeight down;     // [hidden, inner]
    const void* attention_norm;  // [hidden]
    const void* mlp_norm;        // [hidden]
    const void* query_norm;      // [head size], or null
    const void* key_norm;
    void* key_cache;
    void* value_cache;
    float scaling;
    int32_t window;  // 0: none
    int32_t rotary;  // dimensions that are rotated; 0: none in this layer
};

struct HrModel {
    int32_t dtype;  // 0 float32, 1 bfloat16
    int32_t layers, hidden, heads, kv_heads, head_dim, inner, page;
    int32_t activation;  // 0 silu, 1 gelu (tanh)
    float eps;
    int32_t embedding_rows;
    const void* embedding;  // [embedding rows, hidden], or null: rows of `head` (tied)
    const void* final_norm;
    const void* cos;  // [positions, rotary / 2]
    const void* sin;
    int32_t rotary_stride;  // elements between positions
    int32_t positions;
    HrWeight head;  // [vocabulary, hidden]
    const HrLayer* layer;
};

struct HrBatch {
    const int64_t* tokens;       // [T]
    const int64_t* positions;    // [T]
    const int64_t* query_start;  // [S + 1]
    const int64_t* visible;      // [T]
    const int32_t* tables;       // [S, table_stride]
    const int64_t* write_slots;  // [T]
    const int64_t* keep;         // [K]: rows whose logits are wanted, rising
    void* logits;                // [K, logits_stride]
    int64_t logits_stride;
    int32_t num_tokens, num_sequences, table_stride, num_keep;
};

struct HrAttention {
    int32_t dtype, heads, kv_heads, head_dim, page;
    float scaling, softcap;
    int32_t window;
    const float* sinks;
    const void* query;
    const void* key;
    const void* value;
    void* out;
    int64_t query_stride, key_stride, value_stride, out_stride;  // elements between tokens
    void* key_cache;
    void* value_cache;
};

// Rows of logits to choose tokens from (see sampling.h).
struct HrSample {
    const void* logits;         // [rows, vocabulary]
    int64_t logits_stride;      // elements between rows
    const double* temperature;  // [rows]; 0: greedy, and nothing below counts for the row
    const double* top_p;        // [rows]; 1: off
    const double* min_p;        // [rows]; 0: off
    const int64_t* top_k;       // [rows]; 0: off
    const uint64_t* place;      // [rows, 4]: seed, prompt index, choice, position
    int64_t* tokens;            // [rows], written; -1 for a row in which nothing is finite
    int32_t dtype, rows, vocabulary;
};

}  // extern "C"
