#include "base/pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/cores.h"
#include "base/float_mode.h"

namespace fedcore {
namespace {

struct Job {
    Task task;
    const void* context;
    std::int64_t pieces;
    std::atomic<std::int64_t> next{0};   // the next piece to claim
    std::atomic<std::int64_t> ended{0};  // pieces that are done
    std::atomic<int> seats;              // workers that may still join
    std::mutex mutex;                    // guards `error`, and the wait for the last piece
    std::condition_variable all_ended;
    std::exception_ptr error;

    Job(Task body, const void* argument, std::int64_t count, int workers)
        : task(body), context(argument), pieces(count), seats(workers) {}

    bool exhausted() const { return next.load(std::memory_order_relaxed) >= pieces; }

    // Claims and runs pieces until none is left. `context` exists until all claimed pieces have ended, because the
    // caller waits for them. A late worker claims no piece, and so does not access the caller's memory.
    void work() {
        std::int64_t done = 0;
        for (std::int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces; ++done) {
            try {
                task(context, piece);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(mutex);
                if (!error) error = std::current_exception();
            }
        }
        if (done != 0 && ended.fetch_add(done, std::memory_order_acq_rel) + done == pieces) {
            const std::lock_guard<std::mutex> lock(mutex);  // the caller must not be between its test and its wait
            all_ended.notify_all();
        }
    }

    void wait() {
        // The last piece of another thread ends within one block's time; sleeping would cost more than that.
        for (int spin = 0; spin < 2000 && ended.load(std::memory_order_acquire) != pieces; ++spin) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("yield");
#endif
        }
        std::unique_lock<std::mutex> lock(mutex);
        all_ended.wait(lock, [this] { return ended.load(std::memory_order_acquire) == pieces; });
        // Move the error out of the job: the last owner of the job may be a worker, which must not destroy the error.
        if (error) std::rethrow_exception(std::exchange(error, nullptr));
    }
};

// The caller's threads handle the process's signals; workers keep only the signals of their own faults.
void block_signals() {
    sigset_t signals;
    sigfillset(&signals);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&signals, fault);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

// Never destroyed: workers sleep in it until the process ends. Joining them at exit would hang a forked process, or one
// whose interpreter is shutting down.
class Workers {
  public:
    void run(std::int64_t pieces, Task task, const void* context, int workers) {
        const auto job = std::make_shared<Job>(task, context, pieces, workers);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            try {
                for (; started_ < workers; ++started_) std::thread(&Workers::serve, this).detach();
            } catch (const std::system_error&) {
                // The system cannot create a thread; the existing workers and the caller do the work.
            }
            // Workers drop finished jobs, but perhaps no worker gets a core.
            while (!jobs_.empty() && jobs_.front()->exhausted()) jobs_.pop_front();
            jobs_.push_back(job);
        }
        for (int worker = 0; worker < workers; ++worker) wake_.notify_one();
        job->work();
        job->wait();
    }

  private:
    void serve() {
        block_signals();
        const IeeeMode mode;  // not the mode of the thread that started this worker
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            const std::shared_ptr<Job> job = take();
            if (!job) {
                wake_.wait(lock);
                continue;
            }
            lock.unlock();
            job->work();
            lock.lock();
        }
    }

    // A seat in the oldest job with pieces and seats left; drops the jobs without them. Needs the lock.
    std::shared_ptr<Job> take() {
        while (!jobs_.empty()) {
            const auto& job = jobs_.front();
            if (!job->exhausted() && job->seats.fetch_sub(1, std::memory_order_relaxed) > 0) return job;
            jobs_.pop_front();
        }
        return nullptr;
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::shared_ptr<Job>> jobs_;
    int started_ = 0;
};

int default_threads() {
    const char* wanted = std::getenv("FEDCORE_THREADS");
    if (wanted != nullptr && *wanted != '\0') {
        const char* end = wanted + std::strlen(wanted);
        int count = 0;
        const auto [stop, error] = std::from_chars(wanted, end, count);
        if (error == std::errc{} && stop == end && count >= 1 && count <= kMostThreads) return count;
        throw std::runtime_error("FEDCORE_THREADS: expected 1.." + std::to_string(kMostThreads) + " threads, got " +
                                 wanted);
    }
    return std::min(usable_cores(), kMostThreads);
}

std::atomic<int> thread_count{0};  // 0 until the first use
std::atomic<Workers*> current{nullptr};

// A child of fork() has no workers, and the parent's locks may stay locked, so it drops all of them. Registered when
// the module is loaded, before any fork.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });

Workers& workers() {
    Workers* found = current.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    auto* fresh = new Workers;
    if (current.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
    return *found;
}

}  // namespace

void parallel_for(std::int64_t pieces, Task task, const void* context) {
    const int helpers = static_cast<int>(std::min<std::int64_t>(threads(), pieces)) - 1;
    if (helpers < 1) {
        for (std::int64_t piece = 0; piece < pieces; ++piece) task(context, piece);
        return;
    }
    workers().run(pieces, task, context, helpers);
}

int threads() {
    int count = thread_count.load(std::memory_order_relaxed);
    if (count != 0) return count;
    const int fresh = default_threads();
    // If set_threads was called meanwhile, its count is in `count`.
    return thread_count.compare_exchange_strong(count, fresh, std::memory_order_relaxed) ? fresh : count;
}

void set_threads(int count) {
    thread_count.store(count, std::memory_order_relaxed);
}

}  // namespace fedcore
