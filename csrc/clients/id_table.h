// Client ids, each in a place: id -> place by a hash table, place -> id by an array.
//
// The places are 0, 1, 2, ...; a new id gets the lowest free place, so that places never depend on the hash.
// The hash is keyed: ids may come from clients, and must not be chosen to collide.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "clients/siphash.h"

namespace fedcore {

// An id as its caller holds it: a number, or a text of any bytes. The number 7 and the text "7" are two ids.
struct ClientId {
    bool is_text;
    std::uint64_t number;
    std::string_view text;
};

constexpr std::int64_t kNone = -1;

// Memory: 9 bytes a place, 11 to 16 an id, and a text's length + 4. The table shrinks after most of its ids are
// removed.
//   A call that throws (std::bad_alloc, std::length_error past kMostPlaces or for a text of 4 GiB) changes nothing.
class IdTable {
  public:
    static constexpr std::int64_t kMostPlaces = 0x7FFFFFFF;

    explicit IdTable(const SipKey& key) : key_(key) {}

    std::int64_t size() const { return size_; }
    // One past the highest used place.
    std::int64_t places() const { return static_cast<std::int64_t>(kinds_.size()); }

    // Makes room for that many more ids at once; otherwise the table grows in steps, each with a copy.
    void reserve(std::int64_t more);

    // The id's place, or kNone.
    std::int64_t find(const ClientId& id) const;

    // Puts the id into the lowest free place and returns that; kNone if it is in one already.
    std::int64_t insert(const ClientId& id);

    // Puts the id into `place` and leaves those between places() and it free; false if the place is taken, or if the id
    // is in one already.
    bool insert_at(const ClientId& id, std::int64_t place);

    // Frees the id's place and returns it; kNone if it is in none.
    std::int64_t erase(const ClientId& id);

    // Whether `place`, any number, holds an id, and that id, whose text is valid until the table changes.
    bool taken(std::int64_t place) const;
    ClientId at(std::int64_t place) const;

  private:
    enum class Kind : std::uint8_t { free, number, text };

    bool has(std::int64_t place, const ClientId& id) const;
    std::size_t home(std::uint64_t slot) const;
    std::size_t next(std::size_t slot) const;
    std::size_t slot_of(const ClientId& id, std::uint64_t tag) const;
    void make_room(const ClientId& id, std::int64_t place);
    void resize(std::size_t slots);
    void put(std::uint64_t slot);
    void close_gap(std::size_t gap);
    void fill(const ClientId& id, std::int64_t place, std::uint64_t tag);
    void set_free(std::int64_t place);
    void drop_stale_front();
    void drop_stale();
    void tidy();
    void compact_texts();

    SipKey key_;
    std::int64_t size_ = 0;
    std::vector<std::uint64_t> slots_;    // open addressing; 0, or 32 bits of the hash, 1 for a text, place + 1
    std::vector<Kind> kinds_;             // by place
    std::vector<std::uint64_t> entries_;  // by place: the number, or the text's position in texts_
    // A heap of the free places, lowest first. Each is in it at least once; entries of used places, or >= places(), are
    // stale.
    std::vector<std::uint32_t> free_;
    std::vector<char> texts_;  // the length in four bytes, then the bytes, text after text
    std::size_t waste_ = 0;    // bytes of texts_ that belong to no id
};

}  // namespace fedcore
