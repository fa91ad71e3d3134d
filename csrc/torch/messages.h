// Messages between two ranks: sends and receives, any number at once.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "deadline.h"
#include "flat.h"
#include "shardcomm.hpp"
#include "signals.h"
#include "work.h"

namespace shardcomm_torch {

// A send or a receive that was started. Whoever hears of its end first says so: a thread that waits
// for it, or that asks, or the thread of `Messages`.
class Message final : public Work {
 public:
  struct Destroy {
    void operator()(shc_request* request) const { shc_request_destroy(request); }
  };
  using Request = std::unique_ptr<shc_request, Destroy>;

  Message(int rank, std::uint64_t sequence, c10d::OpType type, const char* title,
          const at::Tensor& tensor, Flat buffer, Request request,
          std::chrono::milliseconds group_timeout, std::shared_ptr<Completions> completions)
      : Work(rank, sequence, type, title, {tensor}, {tensor}, std::move(completions)),
        received_(type != c10d::OpType::SEND),
        buffer_(std::move(buffer)),
        request_(std::move(request)),
        group_timeout_(group_timeout) {}

  shc_request* request() const { return request_.get(); }

  bool isCompleted() override {
    if (!c10d::Work::isCompleted()) settle(shc_request_test(request()));
    return c10d::Work::isCompleted();
  }

  // Without a timeout at most the group's, after which the group has failed.
  bool wait(std::chrono::milliseconds timeout) override {
    if (!c10d::Work::isCompleted()) {
      const double timeout_s =
          timeout == kNoTimeout ? -1 : std::chrono::duration<double>(timeout).count();
      shc_status status = SHC_OK;
      const Deadline deadline(group_timeout_);
      interruptibly([&] {
        status = shc_request_wait(request(), timeout_s);
        if (status == SHC_INTERRUPTED) throw shc::Error::last();
      });
      if (!settle(status)) throw TimedOut(timeout);
    }
    return Work::wait(kNoTimeout);
  }

  // As Gloo's: -1 until it is known. A send has none.
  int sourceRank() const override {
    if (!received_) return c10d::Work::sourceRank();
    int source = -1;
    const shc_status status = shc_request_source(request(), &source);
    if (status != SHC_NOT_READY) shc::check(status);
    return source;
  }

  std::function<void()> at_end;

 private:
  // Takes what the C library has said of the request. Returns whether it has ended.
  bool settle(shc_status status) {
    if (status == SHC_NOT_READY) return false;
    const std::lock_guard<std::mutex> lock(settling_);
    if (c10d::Work::isCompleted()) return true;
    run([&] {
      shc::check(status);
      if (received_) buffer_.store();
    });
    if (at_end) at_end();
    return true;
  }

  const bool received_;
  const Flat buffer_;
  const Request request_;
  const std::chrono::milliseconds group_timeout_;
  std::mutex settling_;
};

class Messages {
 public:
  Messages(shc_comm* comm, c10::intrusive_ptr<c10d::Backend::Options> options,
           std::shared_ptr<Completions> completions)
      : comm_(comm), options_(std::move(options)), completions_(std::move(completions)) {}
  ~Messages() { stop(); }
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  WorkPointer send(int rank, std::uint64_t sequence, const at::Tensor& tensor, int destination,
                   std::int64_t tag) {
    const Flat buffer({tensor});
    buffer.load();
    Message::Request request(shc::made<shc_request>([&](auto* made) {
      return shc_isend(comm_, buffer.data(), buffer.bytes(), destination, tag, made);
    }));
    return begun(c10::make_intrusive<Message>(rank, sequence, c10d::OpType::SEND, "shardcomm:send",
                                              tensor, buffer, std::move(request), options_->timeout,
                                              completions_));
  }

  // `source`: a rank, or SHC_ANY_SOURCE.
  WorkPointer recv(int rank, std::uint64_t sequence, const at::Tensor& tensor, int source,
                   std::int64_t tag) {
    const Flat buffer({tensor});
    Message::Request request(shc::made<shc_request>([&](auto* made) {
      return shc_irecv(comm_, buffer.data(), buffer.bytes(), source, tag, made);
    }));
    const bool any = source == SHC_ANY_SOURCE;
    const auto type = any ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
    const char* const title = any ? "shardcomm:recvAnySource" : "shardcomm:recv";
    return begun(c10::make_intrusive<Message>(rank, sequence, type, title, tensor, buffer,
                                              std::move(request), options_->timeout, completions_));
  }

  // Ends the thread. The communicator is closed, so that all messages have ended.
  void stop() {
    if (getpid() != owner_) {  // as in CallQueue
      if (thread_.joinable()) thread_.detach();
      return;
    }
    std::thread ending;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending.swap(thread_);
    }
    if (ending.joinable()) ending.join();
  }

 private:
  // A message that has not ended needs a thread that moves it: its program may do other things
  // before it waits.
  WorkPointer begun(const c10::intrusive_ptr<Message>& message) {
    if (message->isCompleted()) return message;
    message->at_end = [this, request = message->request()] {
      const std::lock_guard<std::mutex> lock(mutex_);
      underway_.erase(request);
    };
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      underway_[message->request()] = message;
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    }
    // Again: the thread may have heard of its end, or have ended itself, before it knew the
    // message.
    message->isCompleted();
    return message;
  }

  void run() {
    shc_status status = SHC_OK;
    while (status == SHC_OK || status == SHC_NOT_READY) {
      shc_request* ended = nullptr;
      status = shc_wait_any(comm_, -1, &ended);
      if (status != SHC_OK) continue;
      // It asks again: a later request may have got the address of one that is gone.
      if (const auto message = find(ended)) message->isCompleted();
    }
    // For want of memory, for instance: without this thread messages would not move.
    if (status != SHC_COMM_ERROR) shc_comm_abort(comm_, shc_last_error_text());
    std::map<shc_request*, c10::intrusive_ptr<Message>> all;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      all = underway_;
    }
    for (const auto& known : all) known.second->isCompleted();
  }

  c10::intrusive_ptr<Message> find(shc_request* request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = underway_.find(request);
    return known == underway_.end() ? nullptr : known->second;
  }

  shc_comm* const comm_;
  const c10::intrusive_ptr<c10d::Backend::Options> options_;
  const std::shared_ptr<Completions> completions_;
  std::mutex mutex_;
  std::map<shc_request*, c10::intrusive_ptr<Message>> underway_;
  std::thread thread_;
  const pid_t owner_ = getpid();
};

}  // namespace shardcomm_torch
