from fasttrain.grouping import grouped


def test_neighbours_are_together_as_many_as_fit():
    assert list(grouped([3, 4, 5, 9, 1, 1], lambda n: n, 7)) == [[3, 4], [5], [9], [1, 1]]
    assert list(grouped([], lambda n: n, 7)) == []
    assert list(grouped("ab", len, 2)) == [["a", "b"]]
