// The base of links that only change when commands are posted: another link carries the commands out.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/link.h"

namespace hybrid_ep {

class ForwardingLink : public Link {
 public:
  explicit ForwardingLink(std::unique_ptr<Link> link) : Link(link->layout()), link_(std::move(link)) {}

  FailureReport& failure() override { return link_->failure(); }
  uint8_t* window() const override { return link_->window(); }
  uint64_t* words() const override { return link_->words(); }
  std::string describe() const override { return link_->describe(); }
  std::string address() const override { return link_->address(); }
  void connect(const std::vector<std::string>& addresses, double timeout_s) override {
    link_->connect(addresses, timeout_s);
  }

  bool post(const Command& command) override { return link_->post(command); }
  bool progress() override { return link_->progress(); }
  bool is_quiet() const override { return link_->is_quiet(); }
  int wait_fd() const override { return link_->wait_fd(); }
  void close() override { link_->close(); }

 private:
  std::unique_ptr<Link> link_;
};

}  // namespace hybrid_ep
