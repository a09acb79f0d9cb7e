// The registered clients and their numbers. Numbers are dense, and stay until the client is removed.
//
// The ids 0 .. count - 1 are their own numbers and take no memory; only the removed ones are listed. All other ids are
// listed in places after them: number = count + place.
#pragma once

#include <cstdint>
#include <vector>

#include "clients/id_table.h"

namespace fedcore {

// For one thread at a time. A call that throws (see IdTable) changes nothing.
class ClientIndex {
  public:
    // 0 <= count <= 2^62.
    ClientIndex(const SipKey& key, std::int64_t count) : count_(count), left_(key), listed_(key) {}

    // The number of registered clients.
    std::int64_t size() const { return count_ - left_.size() + listed_.size(); }
    // One past the highest number of a listed id, and at least count.
    std::int64_t capacity() const { return count_ + listed_.places(); }
    std::int64_t count() const { return count_; }
    // count if none of the ids below it was removed, else 0; the ids below the result are their own numbers.
    std::int64_t whole() const { return left_.size() == 0 ? count_ : 0; }

    // The client's number, or kNone.
    std::int64_t number(const ClientId& id) const;

    // Whether a number belongs to a client, and that client's id, whose text is valid until the index changes.
    bool taken(std::int64_t number) const;
    ClientId id_of(std::int64_t number) const;

    // Makes room for that many more listed clients at once.
    void reserve(std::int64_t more) { listed_.reserve(more); }

    // Registers the client under its own number, or the lowest free one >= count; kNone if it is registered already.
    std::int64_t add(const ClientId& id);

    // Registers a client under a number >= count; false if that is taken, or the client is registered, or its id is one
    // of 0 .. count - 1.
    bool add_at(const ClientId& id, std::int64_t number);

    // Frees the client's number and returns it; kNone if it is not registered.
    std::int64_t remove(const ClientId& id);

    // The removed ids of 0 .. count - 1, ascending.
    std::vector<std::int64_t> left() const;

  private:
    bool is_counted(const ClientId& id) const { return !id.is_text && id.number < static_cast<std::uint64_t>(count_); }

    std::int64_t count_;
    IdTable left_, listed_;
};

}  // namespace fedcore
