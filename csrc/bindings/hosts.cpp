#include "shardcomm/hosts.h"

#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/interrupt.h"

namespace shardcomm::bindings {

void bind_hosts(py::module_& m) {
  m.def(
      "make_hosts",
      [](const std::shared_ptr<Communicator>& on_host, std::vector<int> sockets, int host,
         int hosts) {
        auto across = make_sockets(std::move(sockets), host, hosts);
        const InterruptibleWait scope;
        return destroyed_without_lock(make_hosts(on_host, std::move(across), host, hosts));
      },
      py::arg("on_host").none(false), py::arg("sockets"), py::arg("host"), py::arg("hosts"));
}

}  // namespace shardcomm::bindings
