"""Failed asserts in the helpers of these tests show the compared values, as those in the tests themselves do."""

import pytest

pytest.register_assert_rewrite("tests.pure.planner_world")
