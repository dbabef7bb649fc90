// The library's C functions. Calls from several threads wait for one another: a worker has one step loop.
#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "table.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
#if defined(__x86_64__)
extern const HeadraceTable headrace_table_avx512bf16, headrace_table_avx512, headrace_table_avx2;
#endif
extern const HeadraceTable headrace_table_generic;
}

namespace {

constexpr int ABI_VERSION = 1;  // raised with every change of abi.h or of a function here; library.py has the same

struct Isa {
    const char* name;
    const HeadraceTable* table;
    bool (*runs)();
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
#endif
bool always() { return true; }

const Isa ISAS[] = {
#if defined(__x86_64__)
    {"avx512bf16", &headrace_table_avx512bf16, has_avx512bf16},
    {"avx512", &headrace_table_avx512, has_avx512},
    {"avx2", &headrace_table_avx2, has_avx2},
#endif
    {"generic", &headrace_table_generic, always},
};

const Isa* best() {
    for (const Isa& isa : ISAS)
        if (isa.runs()) return &isa;
    return nullptr;
}

// All of this outlives the end of the process: its other threads may still be computing when main returns, so nothing
// is destroyed.
std::mutex& one_caller = *new std::mutex;
const Isa* chosen = best();
int threads_wanted = 1;

// A pool for each number of threads that was asked for; a decoder stays with its own. Threads of the others sleep.
std::map<int, headrace::Pool*>& pools = *new std::map<int, headrace::Pool*>;

headrace::Pool& the_pool() {
    headrace::Pool*& pool = pools[threads_wanted];
    if (!pool) pool = new headrace::Pool(threads_wanted);
    return *pool;
}

// A fork waits for the step that runs, and the child can go on with what it has of decoders.
void before_fork() {
    one_caller.lock();
    for (auto& pool : pools) pool.second->prepare_fork();
}

void after_fork(bool child) {
    for (auto& pool : pools) pool.second->forked(child);
    one_caller.unlock();
}

const int forks_seen = pthread_atfork(before_fork, [] { after_fork(false); }, [] { after_fork(true); });

struct Made {
    const HeadraceTable* table;
    void* decoder;
    int dtype;
};

}  // namespace

EXPORT int headrace_abi_version() { return ABI_VERSION; }

EXPORT const char* headrace_isa() {
    std::lock_guard<std::mutex> lock(one_caller);
    return chosen->name;
}

// 0 if this CPU (or this build) lacks it.
EXPORT int headrace_select_isa(const char* name) {
    std::lock_guard<std::mutex> lock(one_caller);
    for (const Isa& isa : ISAS)
        if (!std::strcmp(isa.name, name) && isa.runs()) {
            chosen = &isa;
            return 1;
        }
    return 0;
}

// Threads that compute from now on, the caller among them; decoders keep the number that they were made with.
EXPORT void headrace_set_threads(int threads) {
    std::lock_guard<std::mutex> lock(one_caller);
    threads_wanted = threads < 1 ? 1 : threads;
}

EXPORT int headrace_threads() {
    std::lock_guard<std::mutex> lock(one_caller);
    return threads_wanted;
}

// Zeroed memory at a multiple of 2 MiB, in huge pages where the system gives them; null if there is none.
EXPORT void* headrace_alloc(uint64_t bytes) {
    constexpr uint64_t HUGE = 2 << 20;
    const uint64_t size = (bytes + HUGE - 1) / HUGE * HUGE;
    char* all = (char*)mmap(nullptr, size + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    char* start = (char*)((uintptr_t(all) + HUGE - 1) / HUGE * HUGE);
    if (start > all) munmap(all, size_t(start - all));
    if (all + size + HUGE > start + size) munmap(start + size, size_t(all + HUGE - start));
#if defined(MADV_HUGEPAGE)
    madvise(start, size, MADV_HUGEPAGE);
#endif
    return start;
}

EXPORT void headrace_free(void* start, uint64_t bytes) {
    constexpr uint64_t HUGE = 2 << 20;
    munmap(start, (bytes + HUGE - 1) / HUGE * HUGE);
}

EXPORT void* headrace_decoder_new(const HrModel* model) {
    std::lock_guard<std::mutex> lock(one_caller);
    Made* made = new Made{chosen->table, nullptr, model->dtype};
    made->decoder = made->table->decoder_new(the_pool(), *model);
    return made;
}

EXPORT void headrace_decoder_delete(void* decoder) {
    std::lock_guard<std::mutex> lock(one_caller);
    Made* made = (Made*)decoder;
    made->table->decoder_delete(made->decoder, made->dtype);
    delete made;
}

EXPORT void headrace_decoder_forward(void* decoder, const HrBatch* batch) {
    std::lock_guard<std::mutex> lock(one_caller);
    Made* made = (Made*)decoder;
    made->table->decoder_forward(made->decoder, made->dtype, *batch);
}

// Seconds spent since the last call in: embed, norm, qkv, rope, attention, out, gate_up, down, logits.
EXPORT void headrace_decoder_seconds(void* decoder, double* out) {
    std::lock_guard<std::mutex> lock(one_caller);
    Made* made = (Made*)decoder;
    made->table->decoder_seconds(made->decoder, made->dtype, out);
}

EXPORT void headrace_attention(const HrBatch* batch, const HrAttention* call) {
    std::lock_guard<std::mutex> lock(one_caller);
    chosen->table->attention(the_pool(), *batch, *call);
}

EXPORT void headrace_linear(const HrWeight* weight, int dtype, const void* a, int64_t a_stride, int rows, void* out,
                            int64_t out_stride) {
    std::lock_guard<std::mutex> lock(one_caller);
    chosen->table->linear(the_pool(), *weight, dtype, a, a_stride, rows, out, out_stride);
}

EXPORT void headrace_pack(int dtype, const void* source, int64_t stride, int n, int k, int format, void* panels, float* scales) {
    std::lock_guard<std::mutex> lock(one_caller);
    chosen->table->pack(the_pool(), dtype, source, stride, n, k, format, panels, scales);
}

EXPORT void headrace_sample(const HrSample* call) {
    std::lock_guard<std::mutex> lock(one_caller);
    chosen->table->sample(the_pool(), *call);
}
