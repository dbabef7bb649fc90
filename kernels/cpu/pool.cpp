#include "pool.h"

#include <cstring>

namespace headrace {

namespace {
constexpr int SPINS = 3000;  // some 50 us: a step follows a step, and waking a sleeping thread takes as long
}

Pool::Pool(int threads) : phases_(new Phase[MAX_PHASES]) {
    for (int thread = 1; thread < threads; ++thread) helpers_.emplace_back(&Pool::help, this, thread);
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_.store(true);
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
}

void Pool::start(Program program, const void* context, size_t size, int phases) {
    uint32_t step;
    bool wake;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        step = step_.load(std::memory_order_relaxed) + 1;
        // Whoever is still in an earlier step finds another number in each phase, and leaves it alone.
        for (int i = 0; i < phases; ++i) {
            phases_[i].done.store(0, std::memory_order_relaxed);
            phases_[i].next.store(uint64_t(step) << 32, std::memory_order_release);
        }
        program_ = program;
        size_ = size;
        std::memcpy(context_, context, size);
        step_.store(step, std::memory_order_release);
        wake = sleeping_ > 0;
    }
    if (wake) wake_.notify_all();
    Crew crew(*this, step, 0);
    program(crew, context);
}

void Pool::quiesce() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint32_t step = step_.load(std::memory_order_relaxed) + 1;
    for (int i = 0; i < MAX_PHASES; ++i) phases_[i].next.store(uint64_t(step) << 32, std::memory_order_release);
    program_ = nullptr;
    step_.store(step, std::memory_order_release);
    idle_.wait(lock, [&] { return active_ == 0; });
}

void Pool::help(int thread) {
    alignas(64) char context[MAX_CONTEXT];
    uint32_t seen = 0;
    for (;;) {
        for (int spins = 0; spins < SPINS && step_.load(std::memory_order_acquire) == seen; ++spins) relax();
        Program program;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            ++sleeping_;
            wake_.wait(lock, [&] { return stopping_ || step_.load(std::memory_order_relaxed) != seen; });
            --sleeping_;
            if (stopping_) return;
            seen = step_.load(std::memory_order_relaxed);
            program = program_;
            if (!program) continue;
            std::memcpy(context, context_, size_);
            ++active_;
        }
        Crew crew(*this, seen, thread);
        program(crew, context);
        std::lock_guard<std::mutex> lock(mutex_);
        if (--active_ == 0) idle_.notify_all();
    }
}

}  // namespace headrace
