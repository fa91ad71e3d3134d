#include "bindings/bindings.h"
#include "bindings/dlpack.h"
#include "bindings/host_device.h"
#include "bindings/interrupt.h"
#include "comm/inspect.h"
#include "comm/process.h"
#include "shardcomm/communicator.h"
#include "shardcomm/stream.h"

namespace shardcomm::bindings {
namespace {

py::list as_tuples(const std::vector<Pending>& pending) {
  py::list all;
  for (const Pending& p : pending) {
    all.append(py::make_tuple(p.rank, p.pid, p.channel, p.call, p.sequence, p.waiting_s,
                              py::tuple(py::cast(p.waits_for))));
  }
  return all;
}

}  // namespace

void bind_comm(py::module_& m) {
  py::enum_<Use>(m, "Use").value("gather", Use::gather).value("reduce", Use::reduce);

  py::class_<Memory, std::shared_ptr<Memory>>(m, "Memory")
      .def_property_readonly("nbytes", &Memory::bytes)
      .def_property_readonly("device", &Memory::device)
      .def("as_dlpack",
           [](const std::shared_ptr<Memory>& memory) {
             if (memory->device() >= 0 && kHostDevice < 0)
               throw py::buffer_error("this memory is on a CUDA device");
             return as_dlpack(memory->data(), memory->bytes(), memory);
           })
      // https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
      .def_property_readonly("__cuda_array_interface__", [](const Memory& memory) {
        if (memory.device() < 0) throw py::attribute_error("this memory is on the host");
        py::dict view;
        view["version"] = 3;
        view["typestr"] = "|u1";
        view["shape"] = py::make_tuple(memory.bytes());
        view["strides"] = py::none();
        view["data"] =
            py::make_tuple(reinterpret_cast<std::uintptr_t>(memory.data()), /*read-only=*/false);
        return view;
      });

  using Comm = std::shared_ptr<Communicator>;
  py::class_<Communicator, Comm>(m, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("transport", &Communicator::transport)
      .def_property_readonly("exact_sums", &Communicator::exact_sums)
      .def_property_readonly("codes_reduces", &Communicator::codes_reduces)
      .def(
          "allocate",
          [](const Comm& comm, std::size_t nbytes, Use use) {
            std::shared_ptr<Memory> memory;
            {
              const InterruptibleWait scope;
              memory = comm->allocate(nbytes, use);
            }
            return destroyed_without_lock(std::move(memory));
          },
          py::arg("nbytes"), py::arg("use"))
      .def(
          "sharers",
          [](const Communicator& comm, std::uintptr_t buffer, std::size_t nbytes) {
            const Sharers sharers = comm.sharers(pointer(buffer), nbytes);
            return py::make_tuple(sharers.index, sharers.size);
          },
          py::arg("buffer"), py::arg("nbytes"))
      .def("name_tag", &Communicator::name_tag, py::arg("tag"), py::arg("name"))
      .def("abort", &Communicator::abort, py::arg("reason"), py::call_guard<WithoutLock>())
      .def("check", &Communicator::check)
      .def("close", &Communicator::close, py::call_guard<WithoutLock>())
      .def("receipts",
           [](const Communicator& comm) {
             py::list receipts;
             for (const Receipt& r : comm.receipts()) {
               receipts.append(
                   py::make_tuple(r.operation, r.sequence, r.requested, r.taken, r.reason));
             }
             return receipts;
           })
      // No InterruptibleWait: a signal handler asks, inside one.
      .def("pending", [](const Communicator& comm) {
        std::vector<Pending> pending;
        {
          const WithoutLock scope;
          pending = comm.pending();
        }
        return as_tuples(pending);
      });

  py::class_<GroupReport>(m, "GroupReport")
      .def_property_readonly(
          "ranks",  // (number, pid, start, attached, closed)
          [](const GroupReport& report) {
            py::list ranks;
            for (const GroupReport::Rank& r : report.ranks) {
              ranks.append(py::make_tuple(r.number, r.pid, r.start, r.attached, r.closed));
            }
            return ranks;
          })
      .def_readonly("hosts", &GroupReport::hosts)
      .def_readonly("host", &GroupReport::host)
      .def_readonly("failure", &GroupReport::failure)
      .def_property_readonly("pending",
                             [](const GroupReport& report) { return as_tuples(report.pending); });
  m.attr("group_label") = kGroupLabel;
  m.def("read_group", &read_group, py::arg("fd"));

  m.def(
      "make_local_group",
      [](int size, double deadline_s, int device, bool exact_sums) {
        return make_local_group(size, {deadline_s, exact_sums}, device);
      },
      py::arg("size"), py::arg("deadline_s"), py::arg("device") = -1,
      py::arg("exact_sums") = false);

  // (pid, start), as in ProcessId.
  using Process = std::pair<std::int32_t, std::uint64_t>;
  m.def("own_process", [] {
    const ProcessId own = ProcessId::own();
    return Process{own.pid, own.start};
  });
  py::class_<ProcessWatch>(m, "ProcessWatch")
      .def(py::init([](std::int32_t pid, std::uint64_t start) {
             return std::make_unique<ProcessWatch>(ProcessId{pid, start});
           }),
           py::arg("pid"), py::arg("start"))
      .def_property_readonly("ended", &ProcessWatch::ended);

  py::class_<ShmSession>(m, "ShmSession")
      .def(py::init([](int size, const std::vector<Process>& processes) {
             std::vector<ProcessId> ids;
             for (const auto& [pid, start] : processes) ids.push_back({pid, start});
             return std::make_unique<ShmSession>(size, ids);
           }),
           py::arg("size"), py::arg("processes") = std::vector<Process>())
      .def_property_readonly("address", &ShmSession::address);
  py::class_<ShmMember>(m, "ShmMember")
      .def(py::init<const std::string&, int, int>(), py::arg("address"), py::arg("rank"),
           py::arg("size"))
      .def(
          "attach",
          [](ShmMember& member, double deadline_s, bool exact_sums) {
            const InterruptibleWait scope;
            return member.attach({deadline_s, exact_sums});
          },
          py::arg("deadline_s"), py::arg("exact_sums") = false);
  m.def(
      "make_shm",
      [](const std::string& address, int rank, int size, double deadline_s) {
        const InterruptibleWait scope;
        return make_shm(address, rank, size, {deadline_s});
      },
      py::arg("address"), py::arg("rank"), py::arg("size"), py::arg("deadline_s"));
}

}  // namespace shardcomm::bindings
