import { z } from "zod/v3";
import { zodToJsonSchema } from "zod-to-json-schema";
const Person = z.object({ name: z.string().min(1), email: z.string().email().optional() });
const Node = z.object({ v: z.number().int(), kids: z.lazy(() => z.array(Node)) });
const U = z.union([z.object({ a: z.string() }), z.object({ b: z.number() })]);
const E = z.enum(["x", "y"]);
const classes = {
  tuple: z.object({ p: z.tuple([z.number(), z.string()]), r: z.tuple([z.string()]).rest(z.number()) }),
  again: z.object({ a: Person, b: Person, c: z.array(Person) }),
  union_again: z.object({ first: z.union([Person, z.string()]), second: Person, third: z.tuple([E, Person]), fourth: E }),
  in_list: z.object({ a: U, b: U }), node: Node, rec: z.record(z.string(), Person), rec_enum: z.record(E, z.number()),
  rec_regex: z.record(z.string().regex(/^k/), z.number()),
  bounds: z.object({ a: z.number().gt(0).lt(5), b: z.number().int().min(1).max(9), c: z.number().positive(), d: z.number().multipleOf(0.01) }),
  strs: z.object({ a: z.string().email(), b: z.string().url(), c: z.string().uuid(), d: z.string().datetime(), e: z.string().date(), f: z.string().time(), g: z.string().duration(), h: z.string().ip() }),
  two: z.object({ a: z.string().regex(/[A-Z]/).regex(/\d/).min(4) }),
  nullable: z.object({ a: z.string().nullable(), b: Person.nullable(), c: E.nullable(), d: z.number().nullish() }),
  discriminated: z.discriminatedUnion("t", [z.object({ t: z.literal("a"), x: z.number() }), z.object({ t: z.literal("b"), y: z.string() })]),
  inter: z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })), inter_named: z.object({ q: Person.and(z.object({ extra: z.boolean() })) }),
  inter_strict: z.object({ a: z.string() }).strict().and(z.object({ b: z.number() }).strict()),
  strict: Person.strict(), pass: Person.passthrough(), catchall: z.object({ a: z.string() }).catchall(z.number()),
  never: z.object({ a: z.never().optional(), b: z.string() }), set: z.object({ s: z.set(E), t: z.set(z.string()).max(1) }), map: z.object({ m: z.map(z.string(), z.number()) }),
  dates: z.object({ d: z.date(), e: z.date().min(new Date(0)) }), big: z.object({ b: z.bigint() }), lit: z.object({ a: z.literal("x"), b: z.literal(3), c: z.literal(null), d: z.literal(true) }),
  native: z.object({ a: z.nativeEnum({ A: 0, B: 1 }), b: z.nativeEnum({ A: "a", B: 2 }) }),
  any: z.object({ a: z.any(), b: z.unknown(), c: z.null(), d: z.undefined(), e: z.void() }),
  eff: z.object({ a: z.string().transform((s) => s.length), b: z.preprocess((x) => x, z.number()), c: z.string().refine(() => true), d: z.string().default("q"), e: z.number().catch(2), f: z.string().brand("B"), g: z.string().pipe(z.string().max(4)) }),
  desc: Person.describe("someone"), lens: z.object({ a: z.string().length(3), b: z.array(z.number()).length(2), c: z.array(E).nonempty() }),
  lazy_json: z.object({ j: z.lazy(() => z.union([z.string(), z.array(z.any()), z.record(z.any())])) }), prim_union: z.union([z.string(), z.number(), z.null()]), lit_union: z.union([z.literal("a"), z.literal(2)]), mixed_union: z.union([z.string().min(3), z.number()]),
  order: z.object({ items: z.array(z.object({ sku: z.string().regex(/^[A-Z]{3}-\d+$/), qty: z.number().int().positive().max(99), price: z.number().nonnegative() })).min(1).max(2), to: z.object({ zip: z.string().length(5), at: z.string().datetime({ offset: true }).optional() }) }),
};
const out = {};
for (const [name, one] of Object.entries(classes)) out[name] = zodToJsonSchema(one);
console.log(JSON.stringify(out));
