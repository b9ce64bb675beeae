// A few threads that share the items of one kernel call. With one thread (the default) the caller runs everything itself.
// Between calls that follow closely, as in a step, the threads spin for some microseconds; then they sleep.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace splitserve {

class ThreadPool {
 public:
  ~ThreadPool() { resize(1); }

  int64_t size() const { return int64_t(threads_.size()) + 1; }

  // Between calls of run() only.
  void resize(int64_t count) {
    publish([this] { stopping_ = true; });
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    stopping_ = false;
    for (int64_t i = 1; i < count; ++i) threads_.emplace_back([this, seen = round_.load()] { work(seen); });
  }

  // work(first, last) over [0, items) in pieces of `grain`, on all threads; returns when all are done.
  void run(int64_t items, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
    if (threads_.empty() || items <= grain) return work(0, items);
    publish([&] {
      work_ = &work;
      items_ = items;
      grain_ = grain;
      next_ = 0;
      busy_ = int64_t(threads_.size());
    });
    take_items();
    while (busy_.load(std::memory_order_acquire)) std::this_thread::yield();  // each has at most one piece left
  }

 private:
  static constexpr int kSpins = 4000;

  template <class F>
  void publish(F&& change) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      change();
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }

  void take_items() {
    for (int64_t first; (first = next_.fetch_add(grain_)) < items_;) (*work_)(first, std::min(first + grain_, items_));
  }

  void await_round(uint64_t seen) {
    for (int i = 0; i < kSpins; ++i)
      if (round_.load(std::memory_order_acquire) != seen) return;
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return round_.load() != seen; });
  }

  void work(uint64_t seen) {
    while (true) {
      await_round(seen++);
      if (stopping_) return;
      take_items();
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(int64_t, int64_t)>* work_ = nullptr;
  int64_t items_ = 0, grain_ = 1;
  std::atomic<int64_t> next_{0}, busy_{0};
  std::atomic<uint64_t> round_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace splitserve
