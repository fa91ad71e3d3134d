// Streams and events, in C.
#include "shardcomm/stream.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "abi/arguments.h"
#include "abi/handles.h"
#include "abi/status.h"
#include "shardcomm.h"
#include "stream/wait_check.h"

using shardcomm::abi::checked;
using shardcomm::abi::guarded;
using shardcomm::abi::hand_over;
using shardcomm::abi::required;

shc_status shc_stream_create_thread(shc_stream** stream) {
  return guarded("shc_stream_create_thread", [&] {
    hand_over(required(stream, "stream"),
              std::make_unique<shc_stream>(shardcomm::make_thread_stream(), shardcomm::abi::kHost));
  });
}

shc_status shc_stream_borrow_cuda(int device, void* cuda_stream, shc_stream** stream) {
  return guarded("shc_stream_borrow_cuda", [&] {
    hand_over(
        required(stream, "stream"),
        std::make_unique<shc_stream>(shardcomm::borrow_cuda_stream(device, cuda_stream), device));
  });
}

void shc_stream_destroy(shc_stream* stream) { shardcomm::abi::destroy(stream); }

shc_status shc_stream_record(shc_stream* stream, shc_event** event) {
  return guarded("shc_stream_record", [&] {
    shc_event*& result = required(event, "event");
    hand_over(result, std::make_unique<shc_event>(checked(stream, "stream").stream->record()));
  });
}

shc_status shc_stream_wait(shc_stream* stream, const shc_event* event) {
  return guarded("shc_stream_wait",
                 [&] { checked(stream, "stream").stream->wait(checked(event, "event").event); });
}

shc_status shc_event_query(const shc_event* event) {
  return guarded("shc_event_query",
                 [&] { return checked(event, "event").event->query() ? SHC_OK : SHC_NOT_READY; });
}

shc_status shc_event_wait(const shc_event* event, double timeout_s) {
  return guarded("shc_event_wait", [&] {
    const std::shared_ptr<shardcomm::Event> waited = checked(event, "event").event;
    if (std::isnan(timeout_s)) throw std::invalid_argument("timeout_s is not a number");
    constexpr double kLongest = 1e9;  // 30 years: in milliseconds, all clocks can count it
    if (timeout_s < 0 || timeout_s > kLongest) {
      waited->wait();
      return SHC_OK;
    }
    using Milliseconds = std::chrono::milliseconds;
    const Milliseconds timeout(static_cast<std::int64_t>(std::ceil(timeout_s * 1e3)));
    const auto end = std::chrono::steady_clock::now() + timeout;
    Milliseconds left = timeout;
    while (!waited->wait_for(std::min(left, shardcomm::kWaitSlice))) {
      left = std::chrono::ceil<Milliseconds>(end - std::chrono::steady_clock::now());
      if (left <= Milliseconds::zero()) return SHC_NOT_READY;
      shardcomm::check_wait();
    }
    return SHC_OK;
  });
}

void shc_event_destroy(shc_event* event) { shardcomm::abi::destroy(event); }
