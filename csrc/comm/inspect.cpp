#include "comm/inspect.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "comm/control_memory.h"
#include "shardcomm/error.h"

namespace shardcomm {
namespace {

constexpr std::uint64_t kMagic = 0x6d6d6f6364726873;  // "shrdcomm"
// Most changes of the layout change a size; count this up with one that does not.
constexpr std::uint64_t kLayoutVersion = 5;

constexpr std::uint64_t layout() {
  std::uint64_t sum = kLayoutVersion;
  for (const std::size_t bytes :
       {sizeof(GroupMemory), sizeof(GroupMemory::Rank), sizeof(BoardMemory),
        sizeof(BoardMemory::Rank), sizeof(PostedCall), sizeof(Call), sizeof(TagNames),
        sizeof(MailRing), sizeof(Frame), ControlMemory::kStageBytes}) {
    sum = sum * 1'000'003 + bytes;
  }
  return sum;
}

// Memory of others, which this process cannot write to.
class View {
 public:
  View(int fd, std::size_t bytes)
      : data_(mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0)), bytes_(bytes) {
    if (data_ == MAP_FAILED) {
      throw CommError(std::string("cannot map the memory of the group: ") + std::strerror(errno));
    }
  }
  ~View() { munmap(data_, bytes_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  // Readers of it take the pointers that ranks have; none of them writes.
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_;
  std::size_t bytes_;
};

std::size_t file_bytes(int fd) {
  struct stat file{};
  if (fstat(fd, &file) != 0) {
    throw CommError(std::string("cannot read the memory of the group: ") + std::strerror(errno));
  }
  return static_cast<std::size_t>(file.st_size);
}

// What `rank` is in on a channel; nothing, if it is in no collective there. The rank may go on
// while this reads: the answer is then its present call or its next one. `waits_for` never names a
// rank that has come already, since the arrivals of the others are read last.
std::optional<Pending> pending_on(const Group& group, int rank, int channel) {
  const BoardMemory& board = group.board(channel);
  const std::uint64_t came_to = board.ranks[rank].came_to();
  const std::optional<LastCall> last = group.last_call(rank, channel);
  if (!last || !last->pending) return std::nullopt;
  Pending entry;
  entry.rank = group.number(rank);
  entry.pid = group.pid(rank);
  entry.channel = channel == 0 ? "gather" : "reduce";
  entry.call = group.signature(last->call);
  entry.sequence = last->call.sequence;
  for (int other = 0; other < group.size(); ++other) {
    if (last->call.from_root && other != last->call.root) continue;
    if (board.ranks[other].came_to() < came_to) entry.waits_for.push_back(group.number(other));
  }
  std::int64_t waiting_ns = last->waiting_ns;
  if (entry.waits_for.empty() && last->across_ns > 0) {
    waiting_ns = last->across_ns;
    for (int host = 0; host < group.hosts(); ++host) {
      if (host != group.host()) entry.waits_for.push_back(host * group.size() + rank);
    }
  }
  if (!entry.waits_for.empty() && !group.failure()) {
    entry.waiting_s = static_cast<double>(waiting_ns) * 1e-9;
  }
  return entry;
}

// The send or receive in which `rank` is asleep.
std::optional<Pending> pending_message(const Group& group, int rank) {
  const std::optional<LastCall> last = group.message(rank);
  if (!last) return std::nullopt;
  Pending entry;
  entry.rank = group.number(rank);
  entry.pid = group.pid(rank);
  entry.channel = "message";
  entry.call = group.signature(last->call);
  entry.sequence = last->call.sequence;
  entry.waits_for = waits_for(group, rank, last->call);
  if (!group.failure()) entry.waiting_s = static_cast<double>(last->waiting_ns) * 1e-9;
  return entry;
}

}  // namespace

std::vector<int> waits_for(const Group& group, int rank, const Call& message) {
  if (message.root >= 0) return {message.root};
  std::vector<int> others;
  for (int other = 0; other < group.size(); ++other) {
    if (other != rank && !group.closed(other)) others.push_back(other);
  }
  return others;
}

int read_size(int fd) {
  const std::size_t bytes = file_bytes(fd);
  if (bytes < sizeof(GroupMemory)) throw CommError("this is not the memory of a group");
  const View view(fd, bytes);
  const GroupMemory::Head& head = ControlMemory::group(view.data())->head;
  if (__atomic_load_n(&head.magic, __ATOMIC_ACQUIRE) != kMagic) {
    throw CommError("this is not the memory of a group, or an older shardcomm made it");
  }
  if (head.layout != layout()) {
    throw CommError(
        "this group runs with another build of shardcomm, whose memory this one cannot read; use "
        "the same build in all processes");
  }
  const auto size = static_cast<int>(head.size);
  if (head.size < 1 || head.size > bytes / sizeof(GroupMemory::Rank) ||
      ControlMemory::bytes(size) != bytes) {
    throw CommError("the memory of this group is damaged");
  }
  return size;
}

std::vector<Pending> pending(const Group& group) {
  std::vector<Pending> all;
  for (int rank = 0; rank < group.size(); ++rank) {
    bool idle = true;
    for (int channel = 0; channel < Group::kChannels; ++channel) {
      std::optional<Pending> entry = pending_on(group, rank, channel);
      if (!entry) continue;
      all.push_back(std::move(*entry));
      idle = false;
    }
    if (std::optional<Pending> entry = pending_message(group, rank)) {
      all.push_back(std::move(*entry));
      idle = false;
    }
    if (!idle) continue;
    Pending none;
    none.rank = group.number(rank);
    none.pid = group.pid(rank);
    all.push_back(std::move(none));
  }
  return all;
}

GroupReport read_group(int fd) {
  const int size = read_size(fd);
  const View view(fd, ControlMemory::bytes(size));
  GroupMemory* memory = ControlMemory::group(view.data());
  const Group group(
      memory, ControlMemory::boards(view.data(), size), /*rank=*/0, size,
      /*deadline_s=*/0, [](int) { return false; }, ControlMemory::names(view.data(), size));
  GroupReport report;
  for (int r = 0; r < size; ++r) {
    const GroupMemory::Rank& rank = memory->ranks[r];
    const std::int32_t pid = rank.pid.load();  // first: whoever stores it has stored the start
    report.ranks.push_back(
        {group.number(r), pid, rank.start.load(), rank.attached.load() != 0, group.closed(r)});
  }
  report.hosts = group.hosts();
  report.host = group.host();
  report.failure = group.failure().value_or("");
  report.pending = pending(group);
  return report;
}

// Released last, and acquired first by read_size: who sees the mark sees what it stands for.
void mark_readable(GroupMemory& memory, int size) {
  memory.head.layout = layout();
  memory.head.size = static_cast<std::uint64_t>(size);
  __atomic_store_n(&memory.head.magic, kMagic, __ATOMIC_RELEASE);
}

}  // namespace shardcomm
