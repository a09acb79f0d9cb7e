#include "clients/id_table.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>

namespace fedcore {
namespace {

constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);
constexpr std::uint64_t kTextBit = std::uint64_t{1} << 31, kPlaceMask = kTextBit - 1;
using Length = std::uint32_t;

std::int64_t place_of(std::uint64_t slot) {
    return static_cast<std::int64_t>(slot & kPlaceMask) - 1;
}

// A slot without its place.
std::uint64_t tag_of(const SipKey& key, const ClientId& id) {
    const std::uint64_t hash = id.is_text ? siphash(key, id.text) : siphash(key, id.number);
    return hash >> 32 << 32 | (id.is_text ? kTextBit : 0);
}

std::size_t bytes_of(std::string_view text) {
    return sizeof(Length) + text.size();
}

std::string_view text_at(const std::vector<char>& texts, std::uint64_t offset) {
    Length length;
    std::memcpy(&length, texts.data() + offset, sizeof length);
    return {texts.data() + offset + sizeof length, length};
}

// Makes room for `more` elements, and at least doubles the capacity, so that growing one by one takes linear time.
template <class T>
void grow(std::vector<T>& v, std::size_t more) {
    if (v.capacity() - v.size() < more) v.reserve(std::max(v.size() + more, 2 * v.capacity()));
}

template <class T>
void shrink(std::vector<T>& v) {
    if (v.capacity() > 4 * v.size()) v.shrink_to_fit();
}

}  // namespace

void IdTable::reserve(std::int64_t more) {
    const auto size = static_cast<std::size_t>(size_ + more);
    if (4 * size > 3 * slots_.size()) resize(size + size / 2);
    grow(kinds_, static_cast<std::size_t>(more));
    grow(entries_, static_cast<std::size_t>(more));
}

std::int64_t IdTable::find(const ClientId& id) const {
    const std::size_t slot = slot_of(id, tag_of(key_, id));
    return slot == kNowhere ? kNone : place_of(slots_[slot]);
}

std::int64_t IdTable::insert(const ClientId& id) {
    const std::uint64_t tag = tag_of(key_, id);
    if (slot_of(id, tag) != kNowhere) return kNone;
    drop_stale_front();
    const std::int64_t place = free_.empty() ? places() : free_.front();
    make_room(id, place);
    if (!free_.empty()) {
        std::pop_heap(free_.begin(), free_.end(), std::greater<>());
        free_.pop_back();
    }
    fill(id, place, tag);
    return place;
}

bool IdTable::insert_at(const ClientId& id, std::int64_t place) {
    const std::uint64_t tag = tag_of(key_, id);
    if (taken(place) || slot_of(id, tag) != kNowhere) return false;
    make_room(id, place);
    if (place > places()) grow(free_, static_cast<std::size_t>(place - places()));
    for (std::int64_t between = places(); between < place; ++between) set_free(between);
    fill(id, place, tag);
    return true;
}

std::int64_t IdTable::erase(const ClientId& id) {
    const std::size_t slot = slot_of(id, tag_of(key_, id));
    if (slot == kNowhere) return kNone;
    const std::int64_t place = place_of(slots_[slot]);
    if (place + 1 < places()) set_free(place);
    if (id.is_text) waste_ += bytes_of(id.text);
    close_gap(slot);
    kinds_[place] = Kind::free;
    --size_;
    while (!kinds_.empty() && kinds_.back() == Kind::free) {
        kinds_.pop_back();
        entries_.pop_back();
    }
    tidy();
    return place;
}

bool IdTable::taken(std::int64_t place) const {
    return place >= 0 && place < places() && kinds_[place] != Kind::free;
}

ClientId IdTable::at(std::int64_t place) const {
    if (kinds_[place] == Kind::text) return {true, 0, text_at(texts_, entries_[place])};
    return {false, entries_[place], {}};
}

// Whether an id, of the kind in its slot, is the id in `place`.
bool IdTable::has(std::int64_t place, const ClientId& id) const {
    return id.is_text ? text_at(texts_, entries_[place]) == id.text : entries_[place] == id.number;
}

// A slot's home: the hash scaled to the table, whose length may be any up to 2^32.
std::size_t IdTable::home(std::uint64_t slot) const {
    return ((slot >> 32) * slots_.size()) >> 32;
}

std::size_t IdTable::next(std::size_t slot) const {
    return slot + 1 == slots_.size() ? 0 : slot + 1;
}

std::size_t IdTable::slot_of(const ClientId& id, std::uint64_t tag) const {
    if (slots_.empty()) return kNowhere;
    for (std::size_t i = home(tag); slots_[i] != 0; i = next(i))
        if ((slots_[i] & ~kPlaceMask) == tag && has(place_of(slots_[i]), id)) return i;
    return kNowhere;
}

// After this, putting the id into that place cannot fail.
void IdTable::make_room(const ClientId& id, std::int64_t place) {
    if (place >= kMostPlaces) throw std::length_error("at most 2^31 - 1 that are listed one by one");
    if (id.is_text && id.text.size() > ~Length{0}) throw std::length_error("texts below 4 GiB");
    const auto size = static_cast<std::size_t>(size_) + 1;
    if (4 * size > 3 * slots_.size()) resize(std::max<std::size_t>(16, 2 * size));
    if (place >= places()) {
        const auto more = static_cast<std::size_t>(place + 1 - places());
        grow(kinds_, more);
        grow(entries_, more);
    }
    if (id.is_text) grow(texts_, bytes_of(id.text));
}

void IdTable::resize(std::size_t slots) {
    std::vector<std::uint64_t> old(slots);
    old.swap(slots_);
    for (const std::uint64_t slot : old)
        if (slot != 0) put(slot);
}

void IdTable::put(std::uint64_t slot) {
    std::size_t i = home(slot);
    while (slots_[i] != 0) i = next(i);
    slots_[i] = slot;
}

// Empties a slot, and moves up the slots after it whose search would now end early, so that removals leave no marks
// that a search must skip.
void IdTable::close_gap(std::size_t gap) {
    const auto ahead = [this](std::size_t from, std::size_t to) {
        return to >= from ? to - from : to + slots_.size() - from;
    };
    for (std::size_t i = next(gap); slots_[i] != 0; i = next(i)) {
        if (ahead(home(slots_[i]), i) < ahead(gap, i)) continue;  // its search begins after the gap
        slots_[gap] = slots_[i];
        gap = i;
    }
    slots_[gap] = 0;
}

void IdTable::fill(const ClientId& id, std::int64_t place, std::uint64_t tag) {
    if (place >= places()) {
        kinds_.resize(place + 1, Kind::free);
        entries_.resize(place + 1);
    }
    kinds_[place] = id.is_text ? Kind::text : Kind::number;
    entries_[place] = id.is_text ? texts_.size() : id.number;
    if (id.is_text) {
        const auto length = static_cast<Length>(id.text.size());
        const auto* bytes = reinterpret_cast<const char*>(&length);
        texts_.insert(texts_.end(), bytes, bytes + sizeof length);
        texts_.insert(texts_.end(), id.text.begin(), id.text.end());
    }
    put(tag | static_cast<std::uint64_t>(place + 1));
    ++size_;
}

void IdTable::set_free(std::int64_t place) {
    free_.push_back(static_cast<std::uint32_t>(place));
    std::push_heap(free_.begin(), free_.end(), std::greater<>());
}

// After this, the first of the heap is the lowest free place, or the heap is empty.
void IdTable::drop_stale_front() {
    while (!free_.empty() && taken(free_.front())) {
        std::pop_heap(free_.begin(), free_.end(), std::greater<>());
        free_.pop_back();
    }
    if (!free_.empty() && free_.front() >= places()) free_.clear();  // the lowest is stale, so all are
}

void IdTable::drop_stale() {
    const auto stale = [this](std::uint32_t place) { return place >= places() || taken(place); };
    free_.erase(std::remove_if(free_.begin(), free_.end(), stale), free_.end());
    std::sort(free_.begin(), free_.end());  // a sorted vector is a heap
    free_.erase(std::unique(free_.begin(), free_.end()), free_.end());
}

// Frees memory after a removal; each part costs less than the removals since the last time.
void IdTable::tidy() {
    try {
        if (static_cast<std::int64_t>(free_.size()) > 2 * (places() - size_) + 64) drop_stale();
        if (slots_.size() > 64 && static_cast<std::size_t>(size_) < slots_.size() / 8) {
            resize(std::max<std::size_t>(16, 2 * static_cast<std::size_t>(size_)));
            shrink(kinds_);
            shrink(entries_);
            shrink(free_);
        }
        if (waste_ > 4096 && waste_ > texts_.size() / 2 && waste_ > kinds_.size()) compact_texts();
    } catch (const std::bad_alloc&) {
        // It keeps its size.
    }
}

void IdTable::compact_texts() {
    std::vector<char> kept;
    kept.reserve(texts_.size() - waste_);
    for (std::size_t place = 0; place < kinds_.size(); ++place) {
        if (kinds_[place] != Kind::text) continue;
        const char* begin = texts_.data() + entries_[place];
        const char* end = begin + bytes_of(text_at(texts_, entries_[place]));
        entries_[place] = kept.size();
        kept.insert(kept.end(), begin, end);
    }
    texts_.swap(kept);
    waste_ = 0;
}

}  // namespace fedcore
