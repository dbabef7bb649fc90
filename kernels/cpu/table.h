// What one instruction set's build offers; api.cpp picks a table when the library is loaded.
#pragma once

#include "abi.h"
#include "pool.h"

struct HeadraceTable {
    void* (*decoder_new)(headrace::Pool&, const HrModel&);
    void (*decoder_delete)(void*, int dtype);
    void (*decoder_forward)(void*, int dtype, const HrBatch&);
    void (*decoder_seconds)(void*, int dtype, double*);
    void (*attention)(headrace::Pool&, const HrBatch&, const HrAttention&);
    void (*linear)(headrace::Pool&, const HrWeight&, int dtype, const void*, int64_t, int, void*, int64_t);
    void (*pack)(headrace::Pool&, int dtype, const void*, int64_t, int, int, int, void*, float*);
    void (*sample)(headrace::Pool&, const HrSample&);
};
