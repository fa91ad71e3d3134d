// A group's ranks in the C library, the queues on which its calls run, and Gloo, where it is used.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "call_queue.h"
#include "completions.h"
#include "deadline.h"
#include "messages.h"
#include "shardcomm.hpp"
#include "signals.h"
#include "work.h"

namespace shardcomm_torch {

using Tensors = std::vector<at::Tensor>;
// Operation, sequence, requested, taken, reason.
using Receipt = std::tuple<std::string, std::uint64_t, std::string, std::string, std::string>;

// What the C library carries among the ranks of one host alone. Gloo carries it between hosts.
constexpr std::string_view kOnOneHost[] = {"gather", "scatter", "all_to_all", "all_to_all_single",
                                           "reduce", "send",    "recv",       "monitored_barrier"};

// What torch calls a collective.
struct Title {
  c10d::OpType type;
  const char* text;  // in profiles
};

class Group {
 public:
  // `comm` is this object's from now on, or null. `gloo` is a Gloo group of the same ranks for what
  // `comm` does not do, and `reason` says why it does not. It is null where `comm` does all.
  Group(int rank, c10::intrusive_ptr<c10d::Backend::Options> options, shc_comm* comm,
        c10::intrusive_ptr<c10d::Backend> gloo, std::string reason)
      : comm_(comm, shc_comm_destroy),
        options(std::move(options)),
        messages(comm, this->options, completions),
        rank_(rank),
        gloo_(std::move(gloo)),
        reason_(std::move(reason)) {}
  ~Group() { end(); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

 private:
  std::unique_ptr<shc_comm, void (*)(shc_comm*)> comm_;  // outlives what uses it, below

 public:
  const c10::intrusive_ptr<c10d::Backend::Options> options;
  // Futures complete on these threads.
  const std::shared_ptr<Completions> completions = std::make_shared<Completions>();
  // Two channels of the C library: one call of each may run at once.
  CallQueue gathers;
  CallQueue reduces;
  Messages messages;

  shc_comm* comm() const { return comm_.get(); }
  std::uint64_t sequence() const { return sequence_; }
  std::uint64_t next_sequence() { return ++sequence_; }

  // Hands an operation to Gloo, if Gloo is to carry it, and notes that for `receipts`. Returns
  // Gloo, whose function the caller then calls. Null: the C library carries the operation.
  c10d::Backend* hand_to_gloo(const char* operation) {
    if (gloo_ == nullptr) return nullptr;
    const auto* const end = std::end(kOnOneHost);
    if (comm_ && std::find(std::begin(kOnOneHost), end, operation) == end) return nullptr;
    if (stopped_) {
      throw std::runtime_error(std::string(operation) + ": this rank has left the group");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    to_gloo_[operation] = ++sequence_;
    return gloo_.get();
  }
  // A barrier of what goes to Gloo, begun; null: nothing does.
  WorkPointer begin_barrier_of_gloo(const c10d::BarrierOptions& opts) {
    c10d::BarrierOptions of_gloo;
    of_gloo.timeout = opts.timeout;
    return gloo_ ? gloo_->barrier(of_gloo) : nullptr;
  }

  // Of what is begun from now on.
  void set_timeout(std::chrono::milliseconds timeout) {
    check_timeout("set_timeout", timeout);
    options->timeout = timeout;
    if (gloo_) gloo_->setTimeout(timeout);
  }

  // How long a call with the options `opts` may wait for other ranks.
  template <class Opts>
  std::chrono::milliseconds timeout_of(const Opts& opts) const {
    return opts.timeout == c10d::kUnsetTimeout ? options->timeout : opts.timeout;
  }

  // Begins `call`. A synchronous one has ended on return, or throws what `call` throws.
  template <class Opts, class Call>
  WorkPointer begin(CallQueue& queue, const Opts& opts, const Title& title, const Tensors& inputs,
                    const Tensors& results, Call call) {
    if (gathers.runs_here() || reduces.runs_here()) {
      throw std::invalid_argument(
          std::string(title.text) +
          ": called from a signal handler while this thread is in another collective of the group, "
          "which goes on when the handler has returned; let the handler note what is wanted, and "
          "call this afterwards");
    }
    const std::chrono::milliseconds timeout = timeout_of(opts);
    check_timeout(title.text, timeout);
    auto work = c10::make_intrusive<Work>(rank_, ++sequence_, title.type, title.text, inputs,
                                          results, completions);
    const bool now = !opts.asyncOp && queue.run_now([&] {
      const Deadline deadline(timeout);
      work->run([&] { interruptibly(call); });
    });
    if (!now) {
      queue.enqueue([work, timeout, call = std::move(call)] {
        const Deadline deadline(timeout);
        work->run(call);
      });
    }
    if (!opts.asyncOp) work->wait(kNoTimeout);
    return work;
  }

  // Waits for the first `calls` reductions, as a part of a collective: what interrupts it ends the
  // group.
  void wait_for_reduces(std::uint64_t calls) {
    try {
      reduces.wait_for(calls);
    } catch (...) {
      shc_comm_abort(comm(), "interrupted");
      throw;
    }
  }

  // The path of the latest collective of each kind.
  std::vector<Receipt> receipts() {
    std::vector<Receipt> all;
    for (const char* operation : {"all_gather", "all_to_all", "broadcast", "gather", "scatter",
                                  "barrier", "reduce_scatter", "all_reduce", "reduce"}) {
      shc_receipt receipt = SHC_RECEIPT_INIT;
      if (!comm_ || shc_comm_receipt(comm(), operation, &receipt) != SHC_OK) continue;
      all.emplace_back(operation, receipt.sequence, receipt.requested, receipt.taken,
                       receipt.reason);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [operation, sequence] : to_gloo_) {
      all.emplace_back(operation, sequence, "shm", "gloo", reason_);
    }
    return all;
  }

  // Makes every rank's present and later collectives raise, but those that Gloo carries, which has
  // no such thing.
  void abort() {
    if (comm_) shc_comm_abort(comm(), "torch.distributed aborted the group");
  }

  // Leaves the group when all collectives that were begun have ended. Messages that have not ended
  // fail. Throws what a signal handler raises meanwhile.
  void shutdown() {
    const OthersRun others_run;
    for (CallQueue* queue : {&gathers, &reduces}) queue->wait_for(queue->begun());
    leave();
  }

  // Leaves the group at once, and returns when its threads have ended, callbacks as well.
  void leave() {
    if (stopped_.exchange(true)) return;
    const OthersRun others_run;  // callbacks may need the interpreter
    close();
    gathers.stop();
    reduces.stop();
    messages.stop();
    completions->stop();
  }

  // Gives back all that it holds: threads, memory, connections.
  void end() {
    const OthersRun others_run;  // what these wait for may need the interpreter
    leave();
    gloo_ = nullptr;
    comm_ = nullptr;
  }

  // Makes collectives fail that have not ended, on the other ranks too.
  void close() {
    if (comm_) shc_comm_close(comm());
  }

 private:
  static void check_timeout(const char* name, std::chrono::milliseconds timeout) {
    if (timeout.count() > 0) return;
    throw std::invalid_argument(std::string(name) + ": timeout is " +
                                std::to_string(timeout.count()) + " ms; it must be more than 0");
  }

  const int rank_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::string reason_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::map<std::string, std::uint64_t> to_gloo_;  // operations, and their latest sequence
};

}  // namespace shardcomm_torch
