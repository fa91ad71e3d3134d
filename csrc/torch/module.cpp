// shardcomm_torch, the Python module with the backend "shardcomm" of torch.distributed.
//
// shardcomm/interop/backend.py compiles this file against the torch that is installed, and makes
// the groups.
#include <pthread.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "failed.h"

namespace py = pybind11;

namespace {

using shardcomm_torch::Backend;

// The groups of this process. Python may have forgotten its object of one that torch still has.
std::vector<c10::weak_intrusive_ptr<Backend>> groups;

c10::intrusive_ptr<Backend> make(int rank, int size, std::chrono::milliseconds timeout,
                                 std::uintptr_t comm, c10::intrusive_ptr<c10d::Backend> gloo,
                                 std::string reason) {
  auto group = c10::make_intrusive<Backend>(rank, size, timeout, reinterpret_cast<shc_comm*>(comm),
                                            std::move(gloo), std::move(reason));
  const auto gone = [](const auto& known) { return known.expired(); };
  groups.erase(std::remove_if(groups.begin(), groups.end(), gone), groups.end());
  groups.emplace_back(group);
  return group;
}

// In a forked child nobody may destroy a group: its condition variables have waiters, threads of
// the parent's, for which the destructor would wait.
void keep_all() {
  for (const auto& known : groups) known.lock().release();
}

void leave_all() {
  std::vector<c10::intrusive_ptr<Backend>> all;
  for (const auto& known : groups) {
    if (auto group = known.lock()) all.push_back(std::move(group));
  }
  const shardcomm_torch::OthersRun others_run;
  // All first: a callback of one group may wait for a collective of another.
  for (const auto& group : all) group->close();
  for (const auto& group : all) group->leave();
  all.clear();  // while others run
}

}  // namespace

PYBIND11_MODULE(shardcomm_torch, m) {
  pthread_atfork(nullptr, nullptr, keep_all);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const shardcomm_torch::Failed& error) {
      error.raise();
    } catch (const shc::Error& error) {
      shardcomm_torch::Failed(error).raise();
    } catch (const shardcomm_torch::TimedOut& error) {
      PyErr_SetString(PyExc_TimeoutError, error.what());
    }
  });

  m.def(
      "join_hosts",
      [](std::uintptr_t on_host, const std::vector<int>& sockets, int host) {
        const shardcomm_torch::OthersRun others_run;
        const std::unique_ptr<shc_comm, void (*)(shc_comm*)> owner(
            reinterpret_cast<shc_comm*>(on_host), shc_comm_destroy);
        const int hosts = static_cast<int>(sockets.size() / 2);
        shc_comm* comm = nullptr;
        shardcomm_torch::interruptibly([&] {
          shc::check(
              shc_comm_init_hosts_over_sockets(&comm, owner.get(), sockets.data(), host, hosts));
        });
        return reinterpret_cast<std::uintptr_t>(comm);
      },
      py::arg("on_host"), py::arg("sockets"), py::arg("host"));
  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      .def(py::init(&make), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("comm"),
           py::arg("gloo"), py::arg("reason"))
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def("_set_default_timeout", &Backend::setTimeout)  // as Gloo has it
      .def("receipts", &Backend::receipts);
  m.def("leave_all", &leave_all);
}
