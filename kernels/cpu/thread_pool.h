// A few threads that share the items of one kernel call. With one thread (the default) the caller runs everything itself.
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
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    stopping_ = false;
    for (int64_t i = 1; i < count; ++i) threads_.emplace_back([this, seen = round_] { work(seen); });
  }

  // work(first, last) over [0, items) in pieces of `grain`, on all threads; returns when all are done.
  void run(int64_t items, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
    if (threads_.empty() || items <= grain) return work(0, items);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      items_ = items;
      grain_ = grain;
      next_ = 0;
      busy_ = int64_t(threads_.size());
      ++round_;
    }
    wake_.notify_all();
    take_items();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void take_items() {
    for (int64_t first; (first = next_.fetch_add(grain_)) < items_;) (*work_)(first, std::min(first + grain_, items_));
  }

  void work(uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
      if (stopping_) return;
      seen = round_;
      lock.unlock();
      take_items();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int64_t, int64_t)>* work_ = nullptr;
  int64_t items_ = 0, grain_ = 1, busy_ = 0;
  std::atomic<int64_t> next_{0};
  uint64_t round_ = 0;
  bool stopping_ = false;
};

}  // namespace splitserve
