// What torch.distributed gets for a collective that was begun.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "completions.h"
#include "deadline.h"
#include "failed.h"
#include "signals.h"

namespace shardcomm_torch {

using WorkPointer = c10::intrusive_ptr<c10d::Work>;

class Work : public c10d::Work {
 public:
  // `title` is what the profiler shows. `results` are the tensors that the collective writes.
  Work(int rank, std::uint64_t sequence, c10d::OpType type, const char* title,
       const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results,
       std::shared_ptr<Completions> completions)
      : c10d::Work(rank, type, title, inputs),
        sequence_(sequence),
        results_(std::move(results)),
        completions_(std::move(completions)) {}

  // Runs `call`, and keeps what it throws for those who wait.
  template <class Call>
  void run(Call&& call) {
    std::exception_ptr error;
    try {
      call();
    } catch (const shc::Error& of_library) {
      error = std::make_exception_ptr(Failed(of_library));
    } catch (...) {
      error = std::current_exception();
    }
    end(error);
  }

  void end(std::exception_ptr error) {
    finish(std::move(error));
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      future = std::move(awaited_);
    }
    if (future == nullptr) return;
    completions_->post(
        [future, error = exception_, results = results_] { complete(*future, error, results); });
  }

  // Its future is done, too, when this returns; the future's callbacks may still run.
  bool wait(std::chrono::milliseconds timeout) override {
    using Clock = std::chrono::steady_clock;
    const auto end = timeout == kNoTimeout ? Clock::time_point::max() : time_after(timeout);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!completed_) {
      const auto now = Clock::now();
      if (now >= end) throw TimedOut(timeout);
      // In slices, between which Ctrl-C is noticed.
      const auto until = std::min(end, now + kWaitSlice);
      if (cv_.wait_until(lock, until, [this] { return completed_; })) break;
      lock.unlock();
      throw_if_interrupted();
      lock.lock();
    }
    const auto future = future_;
    lock.unlock();
    if (future) future->wait();  // a thread of `Completions`, which waits for nothing, completes it
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  std::vector<at::Tensor> result() override { return results_; }
  std::uint64_t getSequencenumber() const override { return sequence_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (future_ == nullptr) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (completed_) {
        complete(*future_, exception_, results_);
      } else {
        awaited_ = future_;
      }
    }
    return future_;
  }

 private:
  static void complete(c10::ivalue::Future& future, const std::exception_ptr& error,
                       const std::vector<at::Tensor>& results) noexcept {
    try {
      if (error) {
        future.setError(error);
      } else {
        future.markCompleted(c10::IValue(results));
      }
    } catch (const std::exception& trouble) {  // its program has completed it, for instance
      const std::string text = trouble.what();
      TORCH_WARN("the future of a collective: ", text.substr(0, text.find('\n')));
    }
  }

  const std::uint64_t sequence_;
  const std::vector<at::Tensor> results_;
  const std::shared_ptr<Completions> completions_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> awaited_;  // the same, until it is completed
};

}  // namespace shardcomm_torch
