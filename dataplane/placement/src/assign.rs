//! Cheapest assignment of rows to columns by shortest augmenting paths.

/// Cost of a pair that must not be made. Real costs stay far below.
pub(crate) const FORBIDDEN: i64 = 1 << 58;

/// For each row the column that makes the sum of the costs smallest; no column is used twice.
///
/// `costs` has one slice per row, all of the same length, at least as long as there are rows. The
/// work is rows x rows x columns.
pub(crate) fn cheapest_assignment(costs: &[Vec<i64>]) -> Vec<usize> {
    let rows = costs.len();
    let columns = costs.first().map_or(0, Vec::len);
    assert!(columns >= rows, "an assignment needs a column for each row");
    // Row and column 0 are the start of each search, so real ones count from 1.
    let mut row_potential = vec![0_i64; rows + 1];
    let mut column_potential = vec![0_i64; columns + 1];
    let mut row_of = vec![0_usize; columns + 1];
    for row in 1..=rows {
        row_of[0] = row;
        let came_from = shortest_path(
            costs,
            &mut row_of,
            &mut row_potential,
            &mut column_potential,
        );
        let (mut column, previous) = came_from;
        while column != 0 {
            row_of[column] = row_of[previous[column]];
            column = previous[column];
        }
    }
    let mut assigned = vec![0; rows];
    for (column, row) in row_of.iter().enumerate().skip(1) {
        if *row != 0 {
            assigned[*row - 1] = column - 1;
        }
    }
    assigned
}

/// The free column that is cheapest to reach from the row at column 0, and for each column the one
/// before it on the way. Adjusts the potentials so that no reduced cost is negative.
fn shortest_path(
    costs: &[Vec<i64>],
    row_of: &mut [usize],
    row_potential: &mut [i64],
    column_potential: &mut [i64],
) -> (usize, Vec<usize>) {
    let columns = row_of.len();
    let mut distance = vec![i64::MAX; columns];
    let mut previous = vec![0_usize; columns];
    let mut is_done = vec![false; columns];
    let mut column = 0;
    loop {
        is_done[column] = true;
        let row = row_of[column];
        let mut step = i64::MAX;
        let mut next = 0;
        for other in 1..columns {
            if is_done[other] {
                continue;
            }
            let reduced = costs[row - 1][other - 1] - row_potential[row] - column_potential[other];
            if reduced < distance[other] {
                distance[other] = reduced;
                previous[other] = column;
            }
            if distance[other] < step {
                step = distance[other];
                next = other;
            }
        }
        for other in 0..columns {
            if is_done[other] {
                row_potential[row_of[other]] += step;
                column_potential[other] -= step;
            } else if other > 0 {
                distance[other] -= step;
            }
        }
        column = next;
        if row_of[column] == 0 {
            return (column, previous);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn total(costs: &[Vec<i64>], assigned: &[usize]) -> i64 {
        assigned
            .iter()
            .enumerate()
            .map(|(row, column)| costs[row][*column])
            .sum()
    }

    fn cheapest_by_force(costs: &[Vec<i64>], used: &mut Vec<bool>, row: usize) -> i64 {
        if row == costs.len() {
            return 0;
        }
        let mut best = i64::MAX;
        for column in 0..used.len() {
            if !used[column] {
                used[column] = true;
                best = best.min(costs[row][column] + cheapest_by_force(costs, used, row + 1));
                used[column] = false;
            }
        }
        best
    }

    #[test]
    fn the_cheap_column_goes_to_the_row_that_needs_it() {
        assert_eq!(
            cheapest_assignment(&[vec![1, 2, 9], vec![1, FORBIDDEN, 9]]),
            [1, 0]
        );
        assert_eq!(cheapest_assignment(&[]), [0; 0]);
    }

    proptest! {
        #[test]
        fn the_sum_is_the_smallest_of_all(
            rows in 1_usize..5,
            more in 0_usize..3,
            seed in prop::collection::vec(0_i64..20, 40),
        ) {
            let columns = rows + more;
            let costs: Vec<Vec<i64>> =
                (0..rows).map(|row| seed[row * columns..(row + 1) * columns].to_vec()).collect();
            let assigned = cheapest_assignment(&costs);
            let mut distinct = assigned.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), rows);
            let best = cheapest_by_force(&costs, &mut vec![false; columns], 0);
            prop_assert_eq!(total(&costs, &assigned), best);
        }
    }
}
