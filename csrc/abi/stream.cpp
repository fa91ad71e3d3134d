// Streams and events, in C.
#include "shardcomm/stream.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "abi/arguments.h"
#include "abi/handles.h"
#include "abi/status.h"
#include "shardcomm.h"

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
    const std::chrono::milliseconds timeout(static_cast<std::int64_t>(std::ceil(timeout_s * 1e3)));
    return waited->wait_for(timeout) ? SHC_OK : SHC_NOT_READY;
  });
}

void shc_event_destroy(shc_event* event) { shardcomm::abi::destroy(event); }
