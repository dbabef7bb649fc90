// Compiled once for each instruction set, with -DHEADRACE_ISA=<its name>; exports its table.
#include "ops.h"
#include "sampling.h"
#include "table.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace HEADRACE_ISA {
namespace {


void* decoder_new(Pool& pool, const HrModel& model) {
    if (model.dtype == 1) return new Decoder<bf16>(model, pool);
    return new Decoder<float>(model, pool);
}

void decoder_delete(void* decoder, int dtype) {
    if (dtype == 1)
        delete (Decoder<bf16>*)decoder;
    else
        delete (Decoder<float>*)decoder;
}

void decoder_forward(void* decoder, int dtype, const HrBatch& batch) {
    if (dtype == 1)
        ((Decoder<bf16>*)decoder)->forward(batch);
    else
        ((Decoder<float>*)decoder)->forward(batch);
}

void decoder_seconds(void* decoder, int dtype, double* out) {
    if (dtype == 1)
        ((Decoder<bf16>*)decoder)->take_seconds(out);
    else
        ((Decoder<float>*)decoder)->take_seconds(out);
}

void attention_(Pool& pool, const HrBatch& batch, const HrAttention& call) {
    if (call.dtype == 1)
        attention<bf16>(pool, batch, call);
    else
        attention<float>(pool, batch, call);
}

void linear_(Pool& pool, const HrWeight& w, int dtype, const void* a, int64_t a_stride, int rows, void* out, int64_t stride) {
    if (dtype == 1)
        linear<bf16>(pool, w, a, a_stride, rows, out, stride);
    else
        linear<float>(pool, w, a, a_stride, rows, out, stride);
}

void pack_(Pool& pool, int dtype, const void* source, int64_t stride, int n, int k, int format, void* panels, float* scales) {
    if (dtype == 1)
        pack<bf16>(pool, source, stride, n, k, format, panels, scales);
    else
        pack<float>(pool, source, stride, n, k, format, panels, scales);
}

void sample_(Pool& pool, const HrSample& call) {
    if (call.dtype == 1)
        sample<bf16>(pool, call);
    else
        sample<float>(pool, call);
}

}  // namespace
}  // namespace HEADRACE_ISA

extern "C" __attribute__((visibility("hidden"))) const HeadraceTable JOIN(headrace_table_, HEADRACE_ISA) = {
    HEADRACE_ISA::decoder_new, HEADRACE_ISA::decoder_delete, HEADRACE_ISA::decoder_forward, HEADRACE_ISA::decoder_seconds,
    HEADRACE_ISA::attention_,  HEADRACE_ISA::linear_,        HEADRACE_ISA::pack_,           HEADRACE_ISA::sample_,
};
