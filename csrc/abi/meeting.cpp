#include "abi/meeting.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shardcomm/communicator.h"
#include "shardcomm/nccl.h"
#include "stream/fork.h"

namespace shardcomm::abi {
namespace {

// What the bytes of an id are.
struct Id {
  char magic[8] = {'s', 'h', 'c', '_', 'i', 'd', '0', '1'};
  std::int32_t transport = 0;
  std::int32_t size = 0;
  std::int32_t length = 0;
  char payload[sizeof(shc_unique_id) - 20] = {};

  std::string text() const { return {payload, static_cast<std::size_t>(length)}; }
};
static_assert(sizeof(Id) == sizeof(shc_unique_id));

shc_unique_id bytes_of(shc_transport transport, int size, const std::string& payload) {
  Id id;
  id.transport = transport;
  id.size = size;
  id.length = static_cast<std::int32_t>(payload.size());
  if (payload.size() > sizeof(id.payload)) throw std::logic_error("an id is too long");
  payload.copy(id.payload, payload.size());
  shc_unique_id bytes;
  std::memcpy(bytes.bytes, &id, sizeof(id));
  return bytes;
}

Id read(const shc_unique_id& bytes) {
  Id id;
  std::memcpy(&id, bytes.bytes, sizeof(id));
  const bool known = std::memcmp(id.magic, Id().magic, sizeof(id.magic)) == 0;
  if (known && id.length >= 0 && static_cast<std::size_t>(id.length) <= sizeof(id.payload)) {
    return id;
  }
  throw std::invalid_argument(
      "id is not what shc_get_unique_id of this version has made; one process calls that, and "
      "sends the bytes to every rank");
}

// The payload of an id of threads begins with this.
std::string own_process() { return std::to_string(getpid()) + "/"; }

// A group of this process's threads.
struct Threads {
  std::vector<std::shared_ptr<Communicator>> comms;  // empty until the first has come
  std::vector<bool> taken;
  shc_comm_options options{};
};

// What this process keeps for ranks that have not come yet, by the payloads of ids.
struct Begun {
  Begun();

  std::mutex mutex;  // held over a fork, so that the child finds it open
  std::map<std::string, std::unique_ptr<ShmSession>> sessions;
  std::map<std::string, Threads> threads;
  int groups = 0;

  // Lets go of the sessions of other processes' ranks, which do not tell this process that they
  // have attached.
  void forget_complete() {
    for (auto each = sessions.begin(); each != sessions.end();) {
      each = each->second->is_complete() ? sessions.erase(each) : std::next(each);
    }
  }
};

// Never destroyed: threads may still connect while the process ends.
Begun& begun() {
  static Begun& all = *new Begun;
  return all;
}

Begun::Begun() {
  const auto unlock = [] { begun().mutex.unlock(); };
  at_fork([] { begun().mutex.lock(); }, unlock, unlock);
}

// Made as the library is loaded: a child that was forked while a thread makes it would wait for
// that thread for ever.
const bool begun_is_made = (begun(), true);

bool is_of_threads(int transport) { return transport == SHC_LOCAL || transport == SHC_LOCAL_CUDA; }

std::shared_ptr<Communicator> take_thread(const Id& id, int rank, int device,
                                          const shc_comm_options& options) {
  Begun& all = begun();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const std::string name = id.text();
  const auto found = all.threads.find(name);
  if (found == all.threads.end() || name.rfind(own_process(), 0) != 0) {  // or a fork's copy
    throw std::invalid_argument(
        "id is of a group of threads; they must be of the process that made it, and come once "
        "each; processes need an id of SHC_SHM or SHC_NCCL");
  }
  Threads& group = found->second;
  if (group.comms.empty()) {
    group.taken.resize(static_cast<std::size_t>(id.size));
    group.options = options;
    group.comms = make_local_group(id.size, {options.deadline_s, options.exact_sums != 0}, device);
  }
  const bool other_device =
      id.transport == SHC_LOCAL_CUDA && group.options.device != options.device;
  if (other_device || group.options.deadline_s != options.deadline_s ||
      (group.options.exact_sums != 0) != (options.exact_sums != 0)) {
    throw std::invalid_argument("options differ from those of the thread that came first");
  }
  const auto index = static_cast<std::size_t>(rank);
  if (group.taken[index]) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " has come already");
  }
  group.taken[index] = true;
  auto own = std::move(group.comms[index]);
  bool complete = true;
  for (const bool taken : group.taken) complete = complete && taken;
  if (complete) all.threads.erase(found);
  return own;
}

// Forgets a session of this process, if it is one, when all ranks have attached or this one failed.
class SessionEnd {
 public:
  explicit SessionEnd(std::string address) : address_(std::move(address)) {}
  ~SessionEnd() {
    const std::lock_guard<std::mutex> lock(begun().mutex);
    begun().sessions.erase(address_);
  }
  SessionEnd(const SessionEnd&) = delete;
  SessionEnd& operator=(const SessionEnd&) = delete;

 private:
  std::string address_;
};

}  // namespace

shc_unique_id begin_group(shc_transport transport, int size) {
  if (size < 1) {
    throw std::invalid_argument("size is " + std::to_string(size) + "; it must be at least 1");
  }
  Begun& all = begun();
  if (transport == SHC_SHM) {
    auto session = std::make_unique<ShmSession>(size);
    const std::string address = session->address();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.forget_complete();
    all.sessions[address] = std::move(session);
    return bytes_of(transport, size, address);
  }
  if (is_of_threads(transport)) {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const std::string name = own_process() + std::to_string(++all.groups);
    all.threads[name];
    return bytes_of(transport, size, name);
  }
  if (transport == SHC_NCCL) return bytes_of(transport, size, nccl_unique_id());
  throw std::invalid_argument("transport is " + std::to_string(static_cast<int>(transport)) +
                              "; it must be an shc_transport, SHC_SHM to SHC_NCCL");
}

std::unique_ptr<shc_comm> join_group(const shc_unique_id& bytes, int rank, int size,
                                     const shc_comm_options& options) {
  const Id id = read(bytes);
  if (size != id.size) {
    throw std::invalid_argument("size is " + std::to_string(size) + ", and id was made for " +
                                std::to_string(id.size) + " ranks");
  }
  if (rank < 0 || rank >= size) {
    throw std::invalid_argument("rank is " + std::to_string(rank) + "; it must be 0 to " +
                                std::to_string(size - 1));
  }
  const bool on_host = id.transport == SHC_SHM || id.transport == SHC_LOCAL;
  const int device = on_host ? kHost : options.device;
  if (!on_host && options.exact_sums != 0) {
    throw std::invalid_argument(
        "options->exact_sums is set, and id is of memory of a CUDA device; SHC_SHM and SHC_LOCAL "
        "have exact sums");
  }
  if (id.transport == SHC_NCCL) {
    NcclOptions nccl;
    nccl.deadline_s = options.deadline_s;
    return std::make_unique<shc_comm>(make_nccl(id.text(), rank, size, device, nccl), device);
  }
  if (is_of_threads(id.transport)) {
    auto comm = take_thread(id, rank, device, options);
    comm->barrier();
    return std::make_unique<shc_comm>(std::move(comm), device);
  }
  const SessionEnd end(id.text());
  return std::make_unique<shc_comm>(
      make_shm(id.text(), rank, size, {options.deadline_s, options.exact_sums != 0}), device);
}

}  // namespace shardcomm::abi
