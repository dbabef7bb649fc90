#include "pool.h"

#include <cstring>
#include <system_error>

namespace headrace {

namespace {
constexpr int SPINS = 3000;  // some 50 us: a step follows a step, and waking a sleeping thread takes as long
}

void Pool::make_helpers() {
    made_ = true;
    const uint32_t seen = step_.load(std::memory_order_relaxed);
    for (int thread = 1; thread < threads_; ++thread) {
        try {
            std::thread(&Pool::help, this, thread, seen).detach();
        } catch (const std::system_error&) {
            return;  // those that there are do it
        }
    }
}

void Pool::start(Program program, const void* context, size_t size, int phases) {
    uint32_t step;
    bool wake;
    {
        std::lock_guard<std::mutex> lock(meeting_->mutex);
        if (!made_) make_helpers();
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
    if (wake) meeting_->wake.notify_all();
    Crew crew(*this, step, 0);
    program(crew, context);
}

void Pool::settle(std::unique_lock<std::mutex>& lock) {
    const uint32_t step = step_.load(std::memory_order_relaxed) + 1;
    for (int i = 0; i < MAX_PHASES; ++i) phases_[i].next.store(uint64_t(step) << 32, std::memory_order_release);
    program_ = nullptr;
    step_.store(step, std::memory_order_release);
    meeting_->idle.wait(lock, [&] { return active_ == 0; });
}

void Pool::quiesce() {
    std::unique_lock<std::mutex> lock(meeting_->mutex);
    settle(lock);
}

void Pool::prepare_fork() {
    std::unique_lock<std::mutex> lock(meeting_->mutex);
    settle(lock);
    lock.release();  // kept over the fork
}

void Pool::forked(bool child) {
    if (!child) return meeting_->mutex.unlock();
    meeting_ = new Meeting;
    made_ = false;
    sleeping_ = active_ = 0;
}

void Pool::help(int thread, uint32_t seen) {
    alignas(64) char context[MAX_CONTEXT];
    for (;;) {
        for (int spins = 0; spins < SPINS && step_.load(std::memory_order_acquire) == seen; ++spins) relax();
        Program program;
        {
            std::unique_lock<std::mutex> lock(meeting_->mutex);
            ++sleeping_;
            meeting_->wake.wait(lock, [&] { return step_.load(std::memory_order_relaxed) != seen; });
            --sleeping_;
            seen = step_.load(std::memory_order_relaxed);
            program = program_;
            if (!program) continue;
            std::memcpy(context, context_, size_);
            ++active_;
        }
        Crew crew(*this, seen, thread);
        program(crew, context);
        std::lock_guard<std::mutex> lock(meeting_->mutex);
        if (--active_ == 0) meeting_->idle.notify_all();
    }
}

}  // namespace headrace
