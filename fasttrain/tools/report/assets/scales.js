// From values to pixels: scales, ticks, smoothing, paths.

function linear(from, to, start, end) {
  const factor = (end - start) / (to - from || 1);
  const scale = (value) => start + (value - from) * factor;
  scale.invert = (pixel) => from + (pixel - start) / factor;
  scale.ticks = (count) => roundTicks(from, to, count);
  return scale;
}

function logarithmic(from, to, start, end) {
  const inner = linear(Math.log10(from), Math.log10(to), start, end);
  const scale = (value) => (value > 0 ? inner(Math.log10(value)) : NaN);
  scale.invert = (pixel) => 10 ** inner.invert(pixel);
  scale.ticks = (count) => logTicks(from, to, count);
  return scale;
}

function roundTicks(from, to, count) {
  const rough = (to - from) / Math.max(count, 1);
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((multiple) => multiple * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(from, to, count) {
  const decades = Math.log10(to / from);
  if (decades < 0.7) return roundTicks(from, to, count).filter((tick) => tick > 0);
  const multiples = decades <= 2 ? [1, 2, 5] : decades <= 4 ? [1, 3] : [1];
  const every = Math.max(1, Math.ceil(decades / count));
  const ticks = [];
  for (let power = Math.floor(Math.log10(from)); power <= Math.log10(to); power++) {
    if (multiples.length === 1 && power % every) continue;
    for (const multiple of multiples) {
      const tick = Number((multiple * 10 ** power).toPrecision(3));
      if (tick >= from * 0.999 && tick <= to * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

// A moving average that forgets: `amount` of it is left after a usual distance between the points in view. Gaps stay gaps.
function smoothed(x, y, amount, [from, to]) {
  if (!amount || y.length < 3) return y;
  const points = x.filter((place) => place >= from && place <= to).length;
  const usual = (Math.min(to, x[x.length - 1]) - Math.max(from, x[0])) / Math.max(points - 1, 1);
  if (!(usual > 0)) return y;
  let sum = 0, weight = 0, before = null;
  return y.map((value, i) => {
    if (value == null) return null;
    const kept = before == null ? 0 : amount ** ((x[i] - before) / usual);
    sum = sum * kept + value * (1 - amount);
    weight = weight * kept + (1 - amount);
    before = x[i];
    return sum / weight;
  });
}

// The index of the value nearest to `wanted` in an ascending list.
function nearest(list, wanted) {
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - list[low - 1] <= list[low] - wanted ? low - 1 : low;
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value == null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}

const at = (place) => Math.round(place * 10) / 10;

// Values that are not there, or not on the scale, are gaps. A point between two gaps is a dot, by its round ends.
function linePath(x, y, toX, toY) {
  let path = "", open = false;
  for (let i = 0; i < x.length; i++) {
    const place = y[i] == null ? NaN : toY(y[i]);
    if (!Number.isFinite(place)) { open = false; continue; }
    path += open ? `L${at(toX(x[i]))} ${at(place)}` : `M${at(toX(x[i]))} ${at(place)}h0`;
    open = true;
  }
  return path;
}

// Between two curves; one path for each span without gaps. steps: a point stands for all since the one before.
function bandPath(x, low, high, toX, toY, steps = false) {
  let path = "", upper = [], lower = [];
  const close = () => {
    if (upper.length) path += `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
    upper = []; lower = [];
  };
  for (let i = 0; i < x.length; i++) {
    const top = high[i] == null ? NaN : toY(high[i]), bottom = low[i] == null ? NaN : toY(low[i]);
    if (!Number.isFinite(top) || !Number.isFinite(bottom)) { close(); continue; }
    for (const place of steps && i ? [x[i - 1], x[i]] : [x[i]]) {
      upper.push(`${at(toX(place))} ${at(top)}`);
      lower.push(`${at(toX(place))} ${at(bottom)}`);
    }
  }
  close();
  return path;
}
