#include "abi/status.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "abi/arguments.h"
#include "comm/waited.h"
#include "shardcomm/error.h"
#include "stream/wait_check.h"

namespace shardcomm::abi {
namespace {

// Plain memory, since functions that run when the thread or the process ends may still call the
// library, after the thread's objects were destroyed. Writing it needs no other memory.
struct LastError {
  shc_status status = SHC_OK;
  char text[2048] = "";
  const char* kind = "";
  int rank = CommFault::kNobody;
  int reporter = CommFault::kNobody;
  char operation[32] = "";
  std::uint64_t sequence = 0;
};
static_assert(std::is_trivially_destructible_v<LastError>);

thread_local LastError last_error;

// A wait that the thread's wait check has ended.
class Interrupted final : public std::runtime_error, public Interruption {
 public:
  Interrupted() : std::runtime_error("the thread's wait check has ended the wait") {}
};

// Sentences begin with the function's name. Where the core has begun one with an operation's, as in
// "all_gather: send is null", that is the end of the function's name, and is not said twice.
void keep(std::string_view function, shc_status status, std::string_view text) noexcept {
  const std::size_t length = text.substr(0, text.find(": ")).size();
  if (length < text.size() && length < function.size() &&
      function.substr(function.size() - length) == text.substr(0, length)) {
    text.remove_prefix(length + 2);
  }
  last_error = {};
  last_error.status = status;
  std::snprintf(last_error.text, sizeof(last_error.text), "%.*s: %.*s",
                static_cast<int>(function.size()), function.data(), static_cast<int>(text.size()),
                text.data());
}

void keep_fault(const CommFault& fault) noexcept {
  last_error.kind = fault.kind;
  last_error.rank = fault.rank;
  last_error.reporter = fault.reporter;
  copy_text(last_error.operation, fault.operation);
  last_error.sequence = fault.sequence;
}

}  // namespace

shc_status keep_error(const char* function) noexcept {
  try {
    throw;
  } catch (const std::invalid_argument& error) {
    keep(function, SHC_INVALID_ARGUMENT, error.what());
  } catch (const CommError& error) {
    keep(function, SHC_COMM_ERROR, error.what());
    keep_fault(error.fault());
  } catch (const CudaError& error) {
    keep(function, SHC_CUDA_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    keep(function, SHC_OUT_OF_MEMORY, "out of memory");
  } catch (const Interrupted& error) {
    keep(function, SHC_INTERRUPTED, error.what());
  } catch (const std::length_error&) {  // more elements than any vector can have
    keep(function, SHC_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    keep(function, SHC_INTERNAL_ERROR, error.what());
  } catch (...) {
    keep(function, SHC_INTERNAL_ERROR, "an exception that is none of C++'s own");
  }
  return last_error.status;
}

}  // namespace shardcomm::abi

using shardcomm::abi::guarded;
using shardcomm::abi::last_error;

int shc_version() { return SHC_VERSION; }

const char* shc_status_name(shc_status status) {
  switch (status) {
    case SHC_OK:
      return "ok";
    case SHC_NOT_READY:
      return "not ready";
    case SHC_INVALID_ARGUMENT:
      return "invalid argument";
    case SHC_COMM_ERROR:
      return "communication error";
    case SHC_CUDA_ERROR:
      return "CUDA error";
    case SHC_OUT_OF_MEMORY:
      return "out of memory";
    case SHC_INTERNAL_ERROR:
      return "internal error";
    case SHC_INTERRUPTED:
      return "interrupted";
  }
  return "no status";
}

shc_status shc_last_error(shc_error* error) {
  try {
    shc_error result = SHC_ERROR_INIT;
    result.status = last_error.status;
    result.text = last_error.text;
    result.kind = last_error.kind;
    result.rank = last_error.rank;
    result.reporter = last_error.reporter;
    result.operation = last_error.operation;
    result.sequence = last_error.sequence;
    shardcomm::abi::fill("error", error, result);
    return SHC_OK;
  } catch (...) {  // it is not kept: the caller still has to read the error before
    return SHC_INVALID_ARGUMENT;
  }
}

const char* shc_last_error_text() { return last_error.text; }

shc_status shc_set_wait_check(shc_wait_check check, void* context) {
  return guarded("shc_set_wait_check", [&] {
    if (check == nullptr) return shardcomm::set_wait_check({});
    shardcomm::set_wait_check([check, context] {
      if (check(context) != 0) throw shardcomm::abi::Interrupted();
    });
  });
}

shc_status shc_set_deadline(double deadline_s) {
  return guarded("shc_set_deadline", [&] {
    if (!(deadline_s >= 0)) {
      throw std::invalid_argument("deadline_s is " + std::to_string(deadline_s) +
                                  "; it must be more than 0, or 0 for that of each group");
    }
    shardcomm::thread_deadline_s = deadline_s;
  });
}

shc_status shc_get_deadline(double* deadline_s) {
  return guarded("shc_get_deadline", [&] {
    shardcomm::abi::required(deadline_s, "deadline_s") = shardcomm::thread_deadline_s;
  });
}
