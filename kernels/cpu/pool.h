// Threads that share out the tasks of a step's phases.
//
// A step is one program that every thread runs: phase after phase, each some number of independent tasks. A phase is
// over when its tasks are done, not when every thread has come: a thread that the kernel has put aside (the cores are
// shared with gateway, NATS and scheduler) delays nobody unless it holds a task, and skips what it has missed.
//
// Pools live until the process ends and are never joined: a thread may be inside a step when it does. A forked child has
// none of the threads; a step there is computed by its caller, until Pool::start makes new ones.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>

namespace headrace {

class Pool;

// One thread's way through one step.
class Crew {
   public:
    Crew(Pool& pool, uint32_t step, int thread) : thread(thread), pool_(pool), step_(step) {}

    // Take part in the next phase: task(i) for some i of [0, tasks), each taken by one thread. Returns once all are
    // done; false if the step is over, and the program must be left at once.
    template <class Task>
    [[nodiscard]] bool share(int tasks, Task&& task);

    const int thread;  // 0 is the caller

   private:
    Pool& pool_;
    const uint32_t step_;
    int phase_ = 0;
};

// Run by every thread with a copy of the context of its own. Outside of tasks it may look only at that copy, and at
// what lives until Pool::quiesce: a late thread may run it when the step is long over, up to the next phase.
using Program = void (*)(Crew&, const void* context);

class Pool {
   public:
    static constexpr int MAX_PHASES = 1 << 14;
    static constexpr size_t MAX_CONTEXT = 1024;  // bytes

    explicit Pool(int threads) : threads_(threads), phases_(new Phase[MAX_PHASES]) {}
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Those that may take part, the caller among them: where the system gives no more threads, fewer do.
    int threads() const { return threads_; }

    // Run program on all threads, in at most `phases` phases; returns when the calling thread is through, and so all
    // tasks are done. One caller at a time.
    template <class Context, void (*program)(Crew&, const Context&)>
    void run(const Context& context, int phases) {
        static_assert(sizeof(Context) <= MAX_CONTEXT && std::is_trivially_copyable<Context>::value, "a plain struct");
        start([](Crew& crew, const void* copy) { program(crew, *static_cast<const Context*>(copy)); }, &context,
              sizeof(Context), phases);
    }

    // Returns when no thread looks at anything of an earlier step any more.
    void quiesce();

    // Around a fork, with no step running: nobody is in the middle of anything (prepare), the helpers go on (parent), or
    // there are none (child).
    void prepare_fork();
    void forked(bool child);

   private:
    friend class Crew;
    struct alignas(64) Phase {
        std::atomic<uint64_t> next{0};  // step << 32 | next task
        std::atomic<int> done{0};
    };

    void start(Program program, const void* context, size_t size, int phases);
    void help(int thread, uint32_t seen);
    void make_helpers();  // with mutex_
    void settle(std::unique_lock<std::mutex>& lock);

    const int threads_;
    std::unique_ptr<Phase[]> phases_;
    std::atomic<uint32_t> step_{0};

    // Made anew in a forked child: what a condition variable keeps of its waiters can't be undone.
    struct Meeting {
        std::mutex mutex;
        std::condition_variable wake, idle;
    };
    Meeting* meeting_ = new Meeting;
    bool made_ = false;  // from here on under the mutex
    int sleeping_ = 0;
    int active_ = 0;
    Program program_ = nullptr;
    size_t size_ = 0;
    alignas(64) char context_[MAX_CONTEXT];
};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Task>
bool Crew::share(int tasks, Task&& task) {
    Pool::Phase& phase = pool_.phases_[phase_++];
    uint64_t seen = phase.next.load(std::memory_order_acquire);
    for (;;) {
        if (uint32_t(seen >> 32) != step_) return false;
        int index = int(uint32_t(seen));
        if (index >= tasks) break;
        if (!phase.next.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
        task(index);
        phase.done.fetch_add(1, std::memory_order_release);
        seen = phase.next.load(std::memory_order_acquire);
    }
    int spins = 0;
    while (phase.done.load(std::memory_order_acquire) < tasks) {
        if (uint32_t(phase.next.load(std::memory_order_acquire) >> 32) != step_) return false;
        if (++spins < 4000) {
            relax();
        } else {
            std::this_thread::yield();
        }
    }
    return true;
}

}  // namespace headrace
